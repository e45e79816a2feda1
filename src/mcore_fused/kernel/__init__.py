"""Fused linear + cross-entropy + entropy: log-probs and entropies of tokens without holding their logits."""

from mcore_fused.kernel.launches import KernelLaunches, kernel_launches
from mcore_fused.kernel.linear_cross_entropy import linear_cross_entropy

__all__ = ["KernelLaunches", "kernel_launches", "linear_cross_entropy"]
