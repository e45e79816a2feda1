"""The plain definition in float64, for tests: full logits, ``log_softmax``, ordinary autograd.

It shares nothing with the kernels: no chunks, no running statistics, no hand-written gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference_linear_cross_entropy"]


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``labels`` and entropies, in float64, differentiable by ordinary autograd.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, the whole vocabulary.
        labels: integers of shape ``hidden.shape[:-1]``.
        temperature: number or tensor of the labels' shape; ignored rows may hold anything.
        ignore_index: rows with this label give 0, 0 and no gradient.
        scale: multiplies the logits before the temperature divides them.
        vocab_size: only the first ``vocab_size`` rows of ``weight`` are real.

    Returns:
        ``(log_probs, entropy)``, float64, the labels' shape. A label that is neither ``ignore_index`` nor a real
        vocabulary row gives a NaN log-prob.
    """
    rows = weight.shape[0] if vocab_size is None else vocab_size
    ignored = labels == ignore_index
    owned = (labels >= 0) & (labels < rows)
    logits = hidden.double() @ weight[:rows].double().T * scale
    divisor = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device).expand(labels.shape)
    logits = logits / torch.where(ignored, 1.0, divisor)[..., None]
    log_p = torch.log_softmax(logits, dim=-1)
    picked = log_p.gather(-1, torch.where(owned, labels, 0).long()[..., None])[..., 0]
    # torch.special.entr-like product: a masked column has p = 0 and log p = -inf, and contributes 0
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    log_probs = torch.where(owned, picked, torch.nan)
    return torch.where(ignored, 0.0, log_probs), torch.where(ignored, 0.0, entropy)
