"""First steps of another project: what its repository says of Megatron, and the files that judge it."""
