"""The one collective of unpacking: every context-parallel rank gets every rank's slots."""

from __future__ import annotations

import torch

__all__ = ["gather_shards"]


def gather_shards(local: torch.Tensor, group: torch.distributed.ProcessGroup, rank: int) -> list[torch.Tensor]:
    """All ranks' shards, in rank order; only this rank's own keeps its graph.

    Every rank computes the same loss over the whole batch and Megatron then sums gradients over the
    context-parallel ranks, so each rank must contribute the gradient of its own slots once. A gather that
    reduces gradients in backward would count them ``cp_size`` times.

    Args:
        local: this rank's slots; the same shape on every rank.
        group: the context-parallel group.
        rank: this rank inside the group.
    """
    shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(shards, local.detach().contiguous(), group=group)
    shards[rank] = local
    return shards
