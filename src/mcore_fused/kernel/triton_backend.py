"""The fused head on Triton kernels: launches of the forward, and the chunked backward around cuBLAS products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_fused.kernel import launchers
from mcore_fused.kernel.devices import device_traits
from mcore_fused.kernel.launchers import Kept, RowState
from mcore_fused.kernel.operands import Operands, prepare
from mcore_fused.kernel.problem import Gradients, Outcome, Problem, ReduceHidden
from mcore_fused.kernel.products import accumulate_product, product, product_into
from mcore_fused.kernel.schedule import kept_columns, plan_chunks
from mcore_fused.kernel.tensor_parallel import gather_statistics

__all__ = ["forward", "gradients", "scale_in_place"]


def forward(problem: Problem, local_labels: Callable[[], Tensor], keep_bytes: int) -> Outcome:
    """Log-probs and entropies of all tokens; keeps exponentials for the backward as far as ``keep_bytes`` allows."""
    operands = prepare(problem)
    tokens = operands.tokens
    if tokens == 0:
        empty = [torch.empty(0, dtype=torch.float32, device=operands.device) for _ in range(5)]
        if problem.group is not None:
            gather_statistics(operands.hidden.new_empty((4, 0), dtype=torch.float32), problem.group)
        return Outcome(empty[0], empty[1], local_labels(), (empty[2], empty[3], empty[4]), "triton")
    columns = kept_columns(tokens, operands.real_rows, operands.hidden.element_size(), keep_bytes)
    statistics, kept, path = launchers.row_statistics(operands, columns)
    labels = local_labels()
    if problem.group is None:
        state = launchers.finish(operands, labels, statistics, dot=True)
    else:
        mine = launchers.merge(operands, labels, statistics)
        state = launchers.finish(operands, labels, gather_statistics(mine, problem.group), dot=False)
    return Outcome(state.log_probs, state.entropy, labels, (state.lse, state.entropy2, state.target), path, kept)


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
    """Gradients of hidden and weight, one vocabulary chunk after the other.

    The weight gradient of a chunk is written once (or added to ``weight_total``, which is then returned, where the
    caller goes over the tokens in pieces); the hidden gradient accumulates in fp32. The last chunk's weight
    product runs while ``reduce_hidden`` sums the hidden gradient over the shards.
    """
    operands = prepare(problem)
    walk = _Backward(operands, labels, saved, upstream, need_hidden, need_weight, reduce_hidden)
    if need_weight:
        walk.prepare_weight(weight_total, weight_grad_dtype or operands.weight.dtype)
    if operands.tokens == 0 or not (need_hidden or need_weight):
        return walk.empty()
    assert kept is None or isinstance(kept, Kept)
    start = 0
    if kept is not None:
        launchers.kept_to_dlogits(operands, kept, walk.row_state, walk.coefficients)
        start = kept.columns
        walk.multiply(kept.p, 0, start, wide=start < operands.real_rows)
    walk.chunks(start, kept, workspace_bytes)
    return walk.finish()


def scale_in_place(value: Tensor, factor: Tensor) -> None:
    """``value *= factor``, free where the factor is 1; both on the device."""
    traits = device_traits(value.device)
    assert traits is not None
    launchers.scale_in_place(value, factor, traits.programs)


class _Backward:
    """The products of one backward and their accumulators."""

    def __init__(
        self,
        operands: Operands,
        labels: Tensor,
        saved: tuple[Tensor, ...],
        upstream: tuple[Tensor | None, Tensor | None],
        need_hidden: bool,
        need_weight: bool,
        reduce_hidden: ReduceHidden,
    ) -> None:
        self.operands = operands
        self.need_hidden = need_hidden
        self.need_weight = need_weight
        self.reduce_hidden = reduce_hidden
        self.row_state = RowState(labels, *saved)
        self.coefficients = launchers.coefficients(operands, self.row_state, upstream)
        self.grad_hidden: Tensor | None = None
        self.grad_weight: Tensor | None = None
        self.wait: Callable[[], None] | None = None
        self.add_weight = False

    def prepare_weight(self, total: Tensor | None, dtype: torch.dtype) -> None:
        """Write the weight gradient into a new tensor, or add it to ``total``."""
        weight = self.operands.weight
        self.add_weight = total is not None
        self.grad_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device) if total is None else total
        if total is None and self.operands.real_rows < weight.shape[0]:
            self.grad_weight[self.operands.real_rows :].zero_()

    def multiply(self, dlogits: Tensor, first: int, end: int, *, wide: bool) -> None:
        operands = self.operands
        last = end == operands.real_rows
        if self.need_hidden:
            weight = operands.weight[first:end]
            if self.grad_hidden is None:
                self.grad_hidden = product(dlogits, weight, wide=wide or operands.distributed)
            else:
                accumulate_product(self.grad_hidden, dlogits, weight)
            if last:
                self.wait = self.reduce_hidden(self.grad_hidden)
        if self.grad_weight is not None:
            product_into(self.grad_weight[first:end], dlogits.t(), operands.hidden, add=self.add_weight)

    def chunks(self, start: int, kept: Kept | None, workspace_bytes: int) -> None:
        """Columns from ``start`` on; the buffer is gone on return."""
        operands = self.operands
        tokens, width = operands.hidden.shape
        reusable = 0 if kept is None else kept.p.stride(0)
        plan = plan_chunks(
            tokens,
            start,
            operands.real_rows,
            width,
            operands.hidden.element_size(),
            workspace_bytes,
            reusable=reusable,
        )
        size = tokens * plan.columns
        if kept is not None and plan.columns <= reusable:
            buffer = kept.storage[:size]  # the kept columns are used up by now
        else:
            buffer = torch.empty(size, dtype=operands.hidden.dtype, device=operands.device)
        rows = buffer.view(tokens, plan.columns)
        for first, end in plan.ranges:
            dlogits = rows[:, : end - first]
            launchers.dlogits(operands, self.row_state, self.coefficients, dlogits, first, end)
            self.multiply(dlogits, first, end, wide=plan.accumulate)

    def finish(self) -> Gradients:
        if self.need_hidden and self.grad_hidden is None:  # this shard is all padding; the others wait for its sum
            self.grad_hidden = torch.zeros_like(self.operands.hidden, dtype=torch.float32)
            self.wait = self.reduce_hidden(self.grad_hidden)
        if self.wait is not None:
            self.wait()
        hidden = None if self.grad_hidden is None else self.grad_hidden.to(self.operands.hidden.dtype)
        return hidden, self.grad_weight

    def empty(self) -> Gradients:
        if self.grad_weight is not None and not self.add_weight:
            self.grad_weight.zero_()
        return self.finish()
