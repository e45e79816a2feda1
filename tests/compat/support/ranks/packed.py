"""Packed batches on several ranks: what a rank does."""

import torch

from support.models import DEVICE, build
from support.models.context_parallel import ContextParallelAttention
from support.models.packed import Rows
from support.models.partition_mode import partition_mode_known


def weights(tokens):
    """Weights of log-probs and entropy in the loss, one for each token."""
    return torch.linspace(-1, 2, 2 * tokens, dtype=torch.float64, device=DEVICE).reshape(2, tokens)


def jagged_step(shape, lengths, temperatures, options, fused=True, mode="auto"):
    """One step on this rank: its outputs for the whole batch, and its share of the gradients."""
    from mcore_fused.frameworks.forward import forward_no_padding_gen, fused_forward_no_padding_gen

    attention = ContextParallelAttention if shape.cp > 1 else None
    model, nested = build(shape, attention=attention), Rows.of(shape.vocab, lengths).nested
    temperature = torch.tensor(temperatures, dtype=torch.float64, device=DEVICE)
    forward = fused_forward_no_padding_gen(mode=mode) if fused else forward_no_padding_gen()
    output = forward(model, nested, nested, {}, temperature, True, 0, **options)
    values = [output[name].values() for name in ("log_probs", "entropy")]
    sum((weight * value).sum() for weight, value in zip(weights(sum(lengths)), values, strict=True)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [value.detach() for value in values], gradients


def contiguous_step(shape, lengths, temperatures, mode):
    """The same step in the contiguous layout; a release that cannot say so is given a modelled class that can."""
    with partition_mode_known():
        return jagged_step(shape, lengths, temperatures, {"cp_layout": "contiguous"}, mode=mode)


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
