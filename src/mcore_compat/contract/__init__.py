"""Static contracts: what we depend on in megatron-core, read from source without running any of it."""
