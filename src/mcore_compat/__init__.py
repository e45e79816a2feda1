"""Harness that proves a fused-forward implementation on every megatron-core."""
