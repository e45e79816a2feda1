"""The fused head in torch, over vocabulary chunks: the CPU path, the float64 path and the fallback.

It computes what the Triton kernels compute, with the same statistics and the same hand-written gradient, and holds
a few ``[tokens, columns]`` buffers of ``CHUNK_BYTES`` at most, never ``[tokens, vocabulary]``. Half precision inputs
are multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mcore_fused.kernel.problem import Gradients, Outcome, Problem, ReduceHidden
from mcore_fused.kernel.statistics import FINITE_FLOOR, Finished, finish, row_coefficients
from mcore_fused.kernel.tensor_parallel import gather_statistics

__all__ = ["CHUNK_BYTES", "forward", "gradients", "scale_in_place"]

CHUNK_BYTES = 16 << 20


def forward(problem: Problem, local_labels: Callable[[], Tensor], keep_bytes: int) -> Outcome:
    """Log-probs and entropies; nothing is kept whatever the budget, as the memory is not scarce on a host."""
    del keep_bytes
    labels = local_labels()
    pieces = _statistics(problem, labels)
    finished = finish(gather_statistics(pieces, problem.group), labels, problem.ignore_index, problem.logit_scale)
    # copies for the backward: the caller may change the outputs in place
    rows = (finished.log_probs.clone(), finished.entropy.clone(), finished.base, finished.log_total)
    return Outcome(finished.log_probs, finished.entropy, labels, rows, "torch")


def _accumulate_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunks(tokens: int, rows: int, itemsize: int) -> Iterator[tuple[int, int]]:
    columns = max(1, min(rows, CHUNK_BYTES // max(1, tokens * itemsize)))
    for first in range(0, rows, columns):
        yield first, min(first + columns, rows)


def _column(value: float | Tensor) -> float | Tensor:
    return value[:, None] if isinstance(value, Tensor) else value


def _statistics(problem: Problem, labels: Tensor) -> Tensor:
    """``[4, N]``: m, s, b, t of this shard's real vocabulary rows (see statistics.py)."""
    hidden, weight, real_rows = problem.hidden, problem.weight, problem.real_rows
    dtype = _accumulate_dtype(hidden)
    tokens = hidden.shape[0]
    out = torch.zeros((4, tokens), dtype=dtype, device=hidden.device)
    m, s, b, t = out.unbind(0)
    m.fill_(-torch.inf)
    t.fill_(torch.nan)
    wide = hidden.to(dtype)
    scale = _column(problem.logit_scale)
    for first, end in _chunks(tokens, real_rows, dtype.itemsize):
        z = wide @ weight[first:end].to(dtype).T
        local = labels.to(torch.int64) - first
        inside = (local >= 0) & (local < end - first)
        t.copy_(torch.where(inside, z.gather(1, torch.where(inside, local, 0)[:, None])[:, 0], t))
        top = torch.maximum(m, z.amax(1))
        base = torch.where(top == -torch.inf, 0.0, top)
        shift = (m - base) * problem.logit_scale
        factor = torch.exp(shift)
        z.sub_(base[:, None]).mul_(scale)
        p = torch.exp(z)
        b.copy_(torch.where(s > 0, factor * (b + shift * s), 0.0) + z.clamp_(min=FINITE_FLOOR).mul_(p).sum(1))
        s.mul_(factor).add_(p.sum(1))
        m.copy_(top)
    return out


def gradients(
    problem: Problem,
    labels: Tensor,
    saved: tuple[Tensor, ...],
    kept: object | None,
    upstream: tuple[Tensor | None, Tensor | None],
    *,
    need_hidden: bool,
    need_weight: bool,
    reduce_hidden: ReduceHidden,
    workspace_bytes: int,
    weight_total: Tensor | None = None,
    weight_grad_dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of hidden and weight; one that is not needed costs no product.

    ``weight_total`` is added to and returned, where the caller goes over the tokens in pieces.

    The last chunk's weight product runs while ``reduce_hidden`` sums the hidden gradient over the shards.
    """
    del kept, workspace_bytes
    hidden, weight, real_rows = problem.hidden, problem.weight, problem.real_rows
    finished = Finished(*saved)
    rows = row_coefficients(finished, labels, problem.ignore_index, problem.logit_scale, *upstream)
    dtype = _accumulate_dtype(hidden)
    tokens = hidden.shape[0]
    wide = hidden.to(dtype)
    scale = _column(problem.logit_scale)
    grad_hidden = torch.zeros_like(wide) if need_hidden else None
    grad_weight = weight_total
    if need_weight and grad_weight is None:
        grad_weight = torch.zeros(weight.shape, dtype=weight_grad_dtype or weight.dtype, device=weight.device)

    def wait() -> None:
        return None

    if real_rows == 0 and grad_hidden is not None:  # this shard is all padding; the others still wait for its sum
        wait = reduce_hidden(grad_hidden)
    for first, end in _chunks(tokens, real_rows, dtype.itemsize):
        piece = weight[first:end].to(dtype)
        log_p = (wide @ piece.T).sub_(finished.base[:, None]).mul_(scale).sub_(rows.log_total[:, None])
        p = torch.exp(log_p)
        log_p.clamp_(min=FINITE_FLOOR)
        local = labels.to(torch.int64) - first
        inside = (local >= 0) & (local < end - first)
        dlogits = log_p.mul_(rows.b[:, None]).add_(rows.a[:, None]).mul_(p)
        # p of a dead row is exp(-inf) = 0, but its logits may hold inf or NaN
        dlogits.masked_fill_(torch.isposinf(rows.log_total)[:, None], 0.0)
        dlogits.scatter_add_(1, torch.where(inside, local, 0)[:, None], torch.where(inside, rows.g, 0.0)[:, None])
        if grad_hidden is not None:
            grad_hidden.addmm_(dlogits, piece)
            if end == real_rows:
                wait = reduce_hidden(grad_hidden)
        if grad_weight is not None:
            grad_weight[first:end] += (dlogits.T @ wide).to(grad_weight.dtype)
    wait()
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


def scale_in_place(value: Tensor, factor: Tensor) -> None:
    """``value *= factor``; the factor keeps its own precision."""
    value.mul_(factor)
