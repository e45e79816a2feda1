"""The two mappings between hidden states and a vocab-sharded head, as autograd functions.

They do what a stock ``ColumnParallelLinear`` does around its product (megatron-core ``tensor_parallel/layers.py``):
gather along the sequence and reduce-scatter the gradient under sequence parallelism, otherwise leave the hidden
states and all-reduce their gradient. Written on torch.distributed, because the signatures of Megatron's own
mappings differ between releases while their meaning does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

__all__ = ["gather_sequence", "reduce_gradient"]


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = hidden.new_empty(hidden.shape[0] * group.size(), *hidden.shape[1:])
        distributed.all_gather_into_tensor(gathered, hidden.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        shard = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        distributed.reduce_scatter_tensor(shard, gradient.contiguous(), group=ctx.group)
        return shard, None


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def gather_sequence(hidden: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """``[seq / ranks, batch, hidden]`` of every rank -> ``[seq, batch, hidden]``; backward reduce-scatters."""
    gathered: torch.Tensor = _GatherSequence.apply(hidden, group)  # type: ignore[no-untyped-call]
    return gathered


def reduce_gradient(hidden: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """Identity on ``hidden``; backward sums its gradient over the ranks, each of which saw one vocab shard."""
    same: torch.Tensor = _ReduceGradient.apply(hidden, group)  # type: ignore[no-untyped-call]
    return same
