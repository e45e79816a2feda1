"""Fused per-token log-probs and entropy for Megatron's models, without the ``[tokens, vocab]`` logits."""
