"""Packed batches on several ranks: a core attention that sees other ranks' keys, and what a rank does."""

import copy
from itertools import pairwise

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

from . import models
from .models import DEVICE
from .packed import Rows


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


class ContextParallelAttention(DotProductAttention):
    """Causal attention over zigzag-split packed rows, from the definition: keys of all ranks, row by row."""

    def __init__(self, config, *args, **kwargs):
        alone = copy.copy(config)  # the local attention refuses context parallelism in its constructor
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params=None, **kwargs):
        group = parallel_state.get_context_parallel_group()
        size, rank = group.size(), group.rank()
        boundaries = packed_seq_params.cu_seqlens_q_padded.tolist()
        own = []
        for start, end in pairwise(boundaries):
            chunk = (end - start) // (2 * size)
            for index in (rank, 2 * size - 1 - rank):
                own += range(start + index * chunk, start + (index + 1) * chunk)
        own = torch.tensor(own, device=query.device)
        keys, values = (
            _Sum.apply(part.new_zeros(boundaries[-1], *part.shape[1:]).index_copy(0, own, part), group)
            for part in (key, value)
        )
        rows = []
        for start, end in pairwise(boundaries):
            mine = (own >= start) & (own < end)
            if start == end:
                continue
            visible = torch.arange(start, end, device=own.device) <= own[mine, None]
            q, k, v = (part.transpose(0, 1)[None] for part in (query[mine], keys[start:end], values[start:end]))
            row = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            rows.append(row[0].transpose(0, 1))
        return torch.cat(rows).reshape(query.shape[0], -1)


def weights(tokens):
    """Weights of log-probs and entropy in the loss, one for each token."""
    return torch.linspace(-1, 2, 2 * tokens, dtype=torch.float64, device=DEVICE).reshape(2, tokens)


def jagged_step(shape, lengths, temperatures, options, fused=True):
    """One step on this rank: its outputs for the whole batch, and its share of the gradients."""
    from mcore_fused.model_forward import forward_no_padding_gen, fused_forward_no_padding_gen

    if shape.cp > 1:
        models.PackedAttention = ContextParallelAttention  # this process is one rank and ends after the step
    model, nested = models.build(shape), Rows.of(shape.vocab, lengths).nested
    temperature = torch.tensor(temperatures, dtype=torch.float64, device=DEVICE)
    forward = fused_forward_no_padding_gen() if fused else forward_no_padding_gen()
    output = forward(model, nested, nested, {}, temperature, True, 0, **options)
    values = [output[name].values() for name in ("log_probs", "entropy")]
    sum((weight * value).sum() for weight, value in zip(weights(sum(lengths)), values, strict=True)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [value.detach() for value in values], gradients


def contiguous_round_trip(lengths):
    """Pack on this rank, gather, unpack; and what this release's PackedSeqParams says to the layout."""
    from mcore_fused.errors import UnsupportedConfigError
    from mcore_fused.packing import PackingLayout, packed_seq_params, parallel_groups

    groups = parallel_groups()
    layout = PackingLayout.from_lengths(
        lengths, cp_size=groups.cp_size, cp_rank=groups.cp_rank, cp_layout="contiguous", device=DEVICE
    )
    packed = layout.pack(torch.arange(1, sum(lengths) + 1, device=DEVICE))
    values = layout.unpack(packed, groups.cp_group).values()
    try:
        packed_seq_params(layout, groups)
    except UnsupportedConfigError as refusal:
        return values, str(refusal)
    return values, None


def fused_and_unfused_step(*arguments):
    """The same step on this rank through the fused head and through stock logits."""
    return jagged_step(*arguments), jagged_step(*arguments, fused=False)
