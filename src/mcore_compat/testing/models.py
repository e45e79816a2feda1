"""Tiny real Megatron models that run in milliseconds: every feature by one frozen description.

Models are local-spec (torch-only) GPTModels of hidden size 32 and two layers by default. Attention and norms that the
local spec lacks (packed rows, the mark of sequence parallelism) are plugged in; everything else is Megatron's own.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

__all__ = [
    "CONFIG_FIELDS",
    "DEVICE",
    "HAS_MTP",
    "HAS_MUP",
    "Batch",
    "PackedAttention",
    "Shape",
    "batch_for",
    "build",
    "config_for",
    "half_chain",
    "layer_spec",
    "spread_the_logits",
    "unwrapped",
]

CONFIG_FIELDS = frozenset(field.name for field in dataclasses.fields(TransformerConfig))
HAS_MTP = hasattr(gpt_layer_specs, "get_gpt_mtp_block_spec")
HAS_MUP = "use_mup" in CONFIG_FIELDS
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_EXPERTS_PER_TOKEN = 2


@dataclass(frozen=True)
class Shape:
    """Description of a tiny model; hashable, so that built models can be shared.

    Attributes:
        tied: the head shares the embedding's weight.
        vocab: rows of the embedding.
        layers: transformer layers of the whole model.
        hidden: hidden size.
        mtp: depths of multi-token prediction.
        mup: use MuP, with an output multiplier of one half.
        packed: attention takes packed rows.
        experts: experts of each layer's MLP; 0 for a dense MLP.
        dtype: of the parameters.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        sequence_parallel: split activations along the sequence over the tensor-parallel ranks.
        pre_process: the stage has the embedding.
        post_process: the stage has the head.
        recompute: recompute whole layers in the backward.
        positions: Megatron's ``position_embedding_type``.
        seed: of the parameters.
    """

    tied: bool = False
    vocab: int = 97
    layers: int = 2
    hidden: int = 32
    mtp: int = 0
    mup: bool = False
    packed: bool = False
    experts: int = 0
    dtype: torch.dtype = torch.float64
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    pre_process: bool = True
    post_process: bool = True
    recompute: bool = False
    positions: str = "rope"
    seed: int = 0


class SequenceParallelLayerNorm(nn.LayerNorm):
    """Torch's norm with the mark that Megatron's sequence parallelism wants on its parameters."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            cast("Any", parameter).sequence_parallel = config.sequence_parallel


class PackedAttention(DotProductAttention):  # type: ignore[misc]
    """Core attention that runs the rows of a packed batch one by one; the local one refuses packed batches."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Causal attention inside each row."""
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, *args, **kwargs)
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        boundaries = (padded if padded is not None else packed_seq_params.cu_seqlens_q).tolist()
        rows = []
        for start, end in itertools.pairwise(boundaries):
            if start < end:
                q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
                row = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                rows.append(row[0].transpose(0, 1))
        return torch.cat(rows).reshape(query.shape[0], -1)


def config_for(shape: Shape, **overrides: Any) -> Any:
    """The ``TransformerConfig`` of a shape: dropout off, no fused kernels that need extensions.

    Args:
        shape: the description.
        **overrides: further fields of the config.
    """
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "params_dtype": shape.dtype,
        "pipeline_dtype": shape.dtype,
        "bf16": shape.dtype is torch.bfloat16,
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "context_parallel_size": shape.cp,
        "sequence_parallel": shape.sequence_parallel,
    }
    if shape.mtp:
        settings |= {"mtp_num_layers": shape.mtp, "mtp_loss_scaling_factor": 0.1}
    if shape.mup:
        settings |= {"use_mup": True, "mup_base_hidden_size": shape.hidden // 2}
    if shape.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if shape.experts:
        settings |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": _EXPERTS_PER_TOKEN,
            "moe_ffn_hidden_size": shape.hidden,
            "moe_aux_loss_coeff": 0.0,
            # The other dispatcher hands its split sizes as CPU tensors to a collective that wants lists.
            "moe_token_dispatcher_type": "allgather" if DEVICE.type == "cpu" else "alltoall",
            "expert_model_parallel_size": shape.ep,
            "expert_tensor_parallel_size": 1,
            "add_bias_linear": False,
        }
    return TransformerConfig(**(settings | overrides))


def layer_spec(shape: Shape, attention: type | None = None) -> Any:
    """Local (torch-only) layer spec with the parts that the local spec lacks plugged in.

    Args:
        shape: the description.
        attention: core attention in place of :class:`PackedAttention` of packed shapes.
    """
    experts = {"num_experts": shape.experts, "moe_grouped_gemm": False} if shape.experts else {}
    layer = copy.deepcopy(gpt_layer_specs.get_gpt_layer_local_spec(**experts))
    if shape.packed or attention is not None:
        layer.submodules.self_attention.submodules.core_attention = attention or PackedAttention
    if not shape.sequence_parallel:
        return layer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelLayerNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * (shape.layers // shape.pp), layer_norm=SequenceParallelLayerNorm
    )


def build(shape: Shape, *, cls: type | None = None, attention: type | None = None, **overrides: Any) -> Any:
    """A fresh model; the same shape and seed give the same parameters.

    Args:
        shape: the description.
        cls: model class in place of ``GPTModel``.
        attention: core attention in place of :class:`PackedAttention` of packed shapes.
        **overrides: further fields of the model's config.
    """
    torch.manual_seed(shape.seed)
    if shape.experts and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.13 to 0.16 test it without defining it on hosts without Transformer Engine
    config = config_for(shape, **overrides)
    spec = layer_spec(shape, attention)
    extra = {}
    if shape.mtp:
        mtp_layer = spec.layer_specs[0] if isinstance(spec, TransformerBlockSubmodules) else spec
        extra["mtp_block_spec"] = _mtp_spec(shape, config, mtp_layer) if shape.post_process else None
    model = (cls or GPTModel)(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab,
        max_sequence_length=128,
        position_embedding_type=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        pre_process=shape.pre_process,
        post_process=shape.post_process,
        **extra,
    )
    spread_the_logits(model)
    return model.to(device=DEVICE, dtype=shape.dtype)


def _mtp_spec(shape: Shape, config: Any, layer: Any) -> Any:
    spec = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    if shape.sequence_parallel:
        for depth in spec.layer_specs:
            norms = depth.submodules
            norms.enorm = norms.hnorm = norms.layer_norm = SequenceParallelLayerNorm
    return spec


def spread_the_logits(model: nn.Module) -> None:
    """Enlarge embedding and head: near-uniform distributions would hide wrong pairings of tokens and labels."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.mul_(20)


@dataclass(frozen=True)
class Batch:
    """Inputs of one call.

    Attributes:
        ids: ``[batch, seq]``, int64.
        positions: ``[batch, seq]``, int64.
        mask: ``[1, 1, seq, seq]``, True where attention is masked out.
        labels: ``[batch, seq]``, int64; independent of ``ids``, so that a wrong pairing shows.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The positional arguments of the model's forward."""
        return self.ids, self.positions, self.mask


def batch_for(vocab: int, batch: int, seq: int, seed: int = 0) -> Batch:
    """A random batch with a causal mask."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, vocab, (batch, seq), generator=generator).to(DEVICE) for _ in range(2))
    positions = torch.arange(seq, device=DEVICE)[None].expand(batch, seq)
    mask = torch.tril(torch.ones(1, 1, seq, seq, device=DEVICE)).lt(0.5)
    return Batch(ids, positions, mask, labels)


def half_chain(model: nn.Module) -> Any:
    """The real ``DDP(Float16Module(model))`` of bf16 training, around a copy of the model's config."""
    config = copy.deepcopy(cast("Any", model).config)
    config.bf16, config.params_dtype = True, torch.bfloat16
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return DistributedDataParallel(config, ddp_config, Float16Module(config, model))


def unwrapped(model: nn.Module) -> Any:
    """The language model inside ``language_model`` and ``module`` wrappers."""
    inner: Any = model
    while not hasattr(inner, "compute_language_model_loss"):
        inner = inner.language_model if hasattr(inner, "language_model") else inner.module
    return inner
