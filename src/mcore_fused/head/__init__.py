"""The fused head: hidden states, weight and labels in, log-probs and entropy out."""
