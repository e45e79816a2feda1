"""Rows that do not count cost nothing: a call on the counted rows alone, gathered and scattered on the device.

In reinforcement learning a third to two thirds of the rows are prompt or padding, whose label is ``ignore_index``. With
an upper bound of the number of rows that count, known on the host, their projection is left out: no value is read from
the device, and the shapes do not depend on any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_fused.errors import CallArgumentError

if TYPE_CHECKING:
    from mcore_fused.kernel.arguments import Call

__all__ = ["CountedRows", "counted_call"]


@dataclass(frozen=True)
class CountedRows:
    """Which rows of a call are computed.

    Attributes:
        labels: ``[N]`` of all rows.
        ignore_index: label of the rows that do not count.
        slots: ``[limit]`` row of each computed row; N in slots that are left over.
        overflow: 0-dim bool, more rows count than the limit allows.
    """

    labels: Tensor
    ignore_index: int
    slots: Tensor
    overflow: Tensor

    def gather(self, values: Tensor) -> Tensor:
        """``[N, ...]`` to ``[limit, ...]``; slots that are left over hold any row. Without a gradient."""
        return values.index_select(0, self.slots.clamp(max=values.shape[0] - 1))

    def scatter(self, values: Tensor) -> Tensor:
        """``[limit]`` to ``[N]``: 0 in ignored rows, NaN in rows that count and did not fit, so that it shows."""
        rows: Tensor = _Scatter.apply(values, self.slots, self.labels != self.ignore_index)
        return rows


def counted_call(call: Call) -> tuple[Call, CountedRows | None]:
    """The call on its counted rows, and which those are; the call itself and None if all rows are computed.

    Raises:
        CallArgumentError: with ``check_labels``, more rows count than ``counted_rows``.
    """
    limit, tokens = call.options.counted_rows, call.labels.shape[0]
    if limit is None or limit >= tokens:
        return call, None
    rows = _find(call.labels, call.options.ignore_index, limit)
    if call.options.check_labels and bool(rows.overflow):
        raise CallArgumentError(
            f"counted_rows is {limit} and more labels are not ignore_index ({rows.ignore_index}).",
            "pass the number of labels that count, or an upper bound of it.",
        )
    unused = rows.slots == tokens
    hidden: Tensor = _Gather.apply(call.hidden, rows.slots)
    scale = call.logit_scale
    compact = replace(
        call,
        hidden=hidden,
        labels=rows.gather(call.labels).masked_fill(unused, rows.ignore_index),
        logit_scale=rows.gather(scale).masked_fill(unused, 1.0) if isinstance(scale, Tensor) else scale,
    )
    return compact, rows


def _find(labels: Tensor, ignore_index: int, limit: int) -> CountedRows:
    """The first ``limit`` rows that count, in order; the same on every rank with the same labels."""
    tokens = labels.shape[0]
    counted = labels != ignore_index
    number = counted.cumsum(0)
    slot = torch.where(counted & (number <= limit), number - 1, limit)
    slots = torch.full((limit + 1,), tokens, dtype=torch.int64, device=labels.device)
    # rows that are not computed meet in the last slot, which is dropped
    slots.scatter_(0, slot, torch.arange(tokens, device=labels.device))
    return CountedRows(labels, ignore_index, slots[:limit], number[-1] > limit)


class _Gather(torch.autograd.Function):
    """Rows of the hidden states; backward writes each gradient row once and zeros elsewhere, without atomics."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor) -> Tensor:
        ctx.rows = values.shape[0]
        ctx.save_for_backward(slots)
        return values.index_select(0, slots.clamp(max=ctx.rows - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        rows = gradient.new_zeros((ctx.rows + 1, *gradient.shape[1:]))
        return rows.index_copy_(0, slots, gradient)[: ctx.rows], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        rows = values.new_zeros(counted.shape[0] + 1)
        rows[:-1].masked_fill_(counted, torch.nan)
        return rows.index_copy_(0, slots, values)[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        # a slot that is left over gets some row's gradient; its label is ignore_index, so nothing flows through it
        return gradient.index_select(0, slots.clamp(max=gradient.shape[0] - 1)), None, None
