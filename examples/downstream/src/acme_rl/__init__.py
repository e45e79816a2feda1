"""A made-up project that builds on Megatron."""
