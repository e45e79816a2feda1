"""What a source uses of Megatron, and which upstream change breaks it: both sides are read, neither is run."""
