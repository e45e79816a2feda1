"""The gate: may we upgrade to this megatron-core? Static contract first, then cells, both sides on one subject."""
