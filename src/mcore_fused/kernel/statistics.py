"""What is kept of a row's logits, how pieces of it are combined, and what a gradient needs of it.

A row of raw logits r (before scale and temperature, whose quotient is c) over some vocabulary rows is summarised by
four numbers: the largest ``m``, ``s = sum p``, ``b = sum p * c * (r - m)`` with ``p = exp(c * (r - m))``, and the
label's ``t`` (NaN where no piece owns the label). Summaries of disjoint vocabulary pieces combine exactly, in any
grouping, which serves chunks, splits and tensor parallelism alike. Differences are taken before the multiplication, so
a common offset of the logits cancels before anything is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FINITE_FLOOR", "Finished", "RowCoefficients", "finish", "row_coefficients"]

# Stands in for -inf where it meets p = 0 in a product: 0 * -inf is NaN, 0 * FINITE_FLOOR is 0.
FINITE_FLOOR = -1.0e30


@dataclass(frozen=True)
class Finished:
    """Per row: the two outputs, and what the gradient needs. All ``[N]``, natural logarithms.

    Attributes:
        log_probs: 0 at ignored rows, NaN where no vocabulary row owns the label.
        entropy: 0 at ignored rows.
        base: the raw logit that p is relative to.
        log_total: log of the sum of exponentials relative to ``base``; +inf at ignored rows, so that every p of
            theirs is exactly 0.
    """

    log_probs: Tensor
    entropy: Tensor
    base: Tensor
    log_total: Tensor


@dataclass(frozen=True)
class RowCoefficients:
    """``d loss / d logit = p * (a + b * log p) + [column is the label] * g``, with p from base and log_total.

    The factor scale / temperature is already inside ``a``, ``b`` and ``g``. All ``[N]``. ``log_total`` is +inf
    in rows through which nothing flows.
    """

    log_total: Tensor
    a: Tensor
    b: Tensor
    g: Tensor


def finish(pieces: Tensor, labels: Tensor, ignore_index: int, logit_scale: float | Tensor) -> Finished:
    """Combine ``pieces`` ``[P, 4, N]`` (m, s, b, t of P disjoint vocabulary pieces) into the outputs."""
    m, s, b, t = pieces.unbind(1)
    top = m.amax(0)
    base = torch.where(top == -torch.inf, 0.0, top)
    shift = (m - base) * logit_scale
    factor = torch.exp(shift)
    total = (s * factor).sum(0)
    # an empty or fully masked piece has s = 0 and m = -inf, whose product would be NaN
    moment = torch.where(s > 0, factor * (b + shift * s), 0.0).sum(0)
    log_total = torch.log(total)
    owned = ~torch.isnan(t).all(0)
    log_probs = torch.where(owned, (torch.nansum(t, 0) - base) * logit_scale - log_total, torch.nan)
    entropy = log_total - moment / total
    ignored = labels == ignore_index
    # rounding can carry either output across its bound by one part in 1e7; clamp keeps NaN
    return Finished(
        torch.where(ignored, 0.0, log_probs.clamp(max=0.0)),
        torch.where(ignored, 0.0, entropy.clamp(min=0.0)),
        base,
        torch.where(ignored, torch.inf, log_total),
    )


def row_coefficients(
    finished: Finished,
    labels: Tensor,
    ignore_index: int,
    logit_scale: float | Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> RowCoefficients:
    """Fold both upstream gradients (None, strided and stride-0 ones too) into three numbers a row.

    Ignored rows, and rows whose two upstream gradients are exactly 0, get exactly 0. A row with a label outside the
    vocabulary passes its poison on only where somebody uses its log-prob.
    """
    zero = torch.zeros_like(finished.entropy)
    g1 = zero if grad_log_probs is None else grad_log_probs.reshape(-1).to(zero.dtype)
    g2 = zero if grad_entropy is None else grad_entropy.reshape(-1).to(zero.dtype)
    dead = (labels == ignore_index) | ((g1 == 0) & (g2 == 0))
    # the gradient of the entropy is -p * (log p + entropy)
    g = g1 * logit_scale
    b = -g2 * logit_scale
    a = torch.where(g2 == 0, 0.0, b * finished.entropy) - g
    a = torch.where(torch.isnan(finished.log_probs) & (g1 != 0), torch.nan, a)
    log_total = torch.where(dead, torch.inf, finished.log_total)
    return RowCoefficients(log_total, *(torch.where(dead, 0.0, x) for x in (a, b, g)))
