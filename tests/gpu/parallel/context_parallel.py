"""A model whose attention works across context-parallel ranks, for packing to be proved through.

The local spec's attention has no context parallelism. This one gathers keys and values of all ranks and masks by row
and position, which the packing itself tells for every slot, in whatever layout.
"""

import copy

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from support.models import DEVICE, config_for, model_class

_tags = {}


def set_rows(lengths):
    """Say which rows the next batches have; each token is known by its row and its place in it."""
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    for name, values in (("row", lambda row, length: torch.full((length,), row + 1)),
                         ("place", lambda _row, length: torch.arange(length) + 1)):  # fmt: skip
        flat = torch.cat([values(row, length) for row, length in enumerate(lengths)]).to(DEVICE)
        _tags[name] = torch.nested.nested_tensor_from_jagged(flat, offsets)


class _Gathered(torch.autograd.Function):
    """All ranks' slots, in rank order; the gradient of a slot is the sum of what all ranks say of it."""

    @staticmethod
    def forward(ctx, local, group):
        ctx.group, ctx.size = group, local.shape[0]
        shards = [torch.empty_like(local) for _ in range(group.size())]
        torch.distributed.all_gather(shards, local.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank() * ctx.size :][: ctx.size], None


class ContextParallelAttention(DotProductAttention):
    """Causal attention inside each row of a packed batch that is spread over ranks."""

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params=None, **kwargs):
        from mcore_fused.packing import layout_of

        layout = layout_of(packed_seq_params)
        group = parallel_state.get_context_parallel_group()
        row, place = (layout.pack(_tags[name])[0] for name in ("row", "place"))
        everywhere = {"key": key, "value": value, "row": row, "place": place}
        if group.size() > 1:
            everywhere = {name: _Gathered.apply(tensor, group) for name, tensor in everywhere.items()}
        same = row[:, None] == everywhere["row"][None]
        seen = same & (everywhere["place"][None] <= place[:, None])
        scores = torch.einsum("qhd,khd->hqk", query, everywhere["key"]) / query.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(~seen, -1e4), -1)
        return torch.einsum("hqk,khd->qhd", weights, everywhere["value"]).reshape(query.shape[0], -1)


def build_context_parallel(shape):
    """A fresh model with this attention; positions are learned, so that they travel with the packed batch."""
    torch.manual_seed(shape.seed)
    layer = copy.deepcopy(gpt_layer_specs.get_gpt_layer_local_spec())
    layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    model = model_class()(
        config=config_for(shape),
        transformer_layer_spec=layer,
        vocab_size=shape.vocab,
        max_sequence_length=128,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=shape.tied,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.mul_(20)
    return model.to(device=DEVICE, dtype=shape.dtype)
