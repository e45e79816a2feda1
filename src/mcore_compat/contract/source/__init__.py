"""Read a megatron-core's source without running it."""
