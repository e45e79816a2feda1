"""Tensor parallelism of the head: its group, and the two mappings around a vocab-sharded product.

The mappings do what a stock ``ColumnParallelLinear`` does around its product (``tensor_parallel/layers.py`` of
megatron-core). With sequence parallelism they gather along the sequence and reduce-scatter the gradient. Otherwise
they leave the hidden states as they are and all-reduce the gradient. They use torch.distributed directly because
the signatures of Megatron's own mappings differ between releases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

__all__ = ["gather_sequence", "reduce_gradient", "tensor_parallel_group"]


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


def tensor_parallel_group(layer: nn.Module) -> distributed.ProcessGroup | None:
    """Return the group over which this layer's vocabulary is sharded; None if it is not.

    This is the layer's own group if it has one (``tp_group``, megatron-core 0.13 and later), because a model built
    with explicit process groups may differ from the global ones; otherwise the global group.
    """
    group = getattr(layer, "tp_group", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None
