"""Fused linear + cross-entropy + entropy: log-probs and entropies of tokens without holding their logits."""

from mcore_fused.kernel.launches import KernelLaunches, kernel_launches
from mcore_fused.kernel.linear_cross_entropy import linear_cross_entropy
from mcore_fused.kernel.policy_loss import PolicyLoss, PolicyLossOutput, fused_linear_policy_loss

__all__ = [
    "KernelLaunches",
    "PolicyLoss",
    "PolicyLossOutput",
    "fused_linear_policy_loss",
    "kernel_launches",
    "linear_cross_entropy",
]
