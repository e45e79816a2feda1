"""A core attention that works across context-parallel ranks, in either layout; the local spec's has none.

Which slots a rank holds is computed here from the definition of the layouts, out of what ``packed_seq_params`` says,
and from nothing that the packing under test has computed: boundaries or a layout that were not handed on give wrong
results.
"""

import copy
from itertools import pairwise

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Sum(torch.autograd.Function):
    """Sum over the ranks; every rank's result depends on every rank's part, so gradients are summed too."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        total = value.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def own_slots(params, size, rank):
    """Slots of the global padded buffer that a rank holds, in its order, as ``params`` tell."""
    boundaries = params.cu_seqlens_q_padded.tolist()
    mode = getattr(params, "cp_partition_mode", "zigzag")  # a release without the field knows no other layout
    if size == 1 or mode == "contiguous":
        slab = boundaries[-1] // size
        return list(range(rank * slab, (rank + 1) * slab))
    assert mode == "zigzag", f"unknown layout {mode!r}"
    own = []
    for start, end in pairwise(boundaries):
        chunk = (end - start) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            own += range(start + index * chunk, start + (index + 1) * chunk)
    return own


class ContextParallelAttention(DotProductAttention):
    """Causal attention inside each row of a packed batch that is spread over ranks, with the keys of all ranks."""

    def __init__(self, config, *args, **kwargs):
        alone = copy.copy(config)  # the local attention refuses context parallelism in its constructor
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params=None, **kwargs):
        group = parallel_state.get_context_parallel_group()
        boundaries = packed_seq_params.cu_seqlens_q_padded.tolist()
        own = torch.tensor(own_slots(packed_seq_params, group.size(), group.rank()), device=query.device)
        keys, values = (
            _Sum.apply(part.new_zeros(boundaries[-1], *part.shape[1:]).index_copy(0, own, part), group)
            for part in (key, value)
        )
        rows = []
        for start, end in pairwise(boundaries):
            mine = (own >= start) & (own < end)
            if not mine.any():  # an empty row, or one that lies on other ranks
                continue
            visible = torch.arange(start, end, device=own.device) <= own[mine, None]
            q, k, v = (part.transpose(0, 1)[None] for part in (query[mine], keys[start:end], values[start:end]))
            row = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            rows.append(row[0].transpose(0, 1))
        return torch.cat(rows).reshape(query.shape[0], -1)
