"""Tiny real Megatron models: hidden 32, two layers, every feature by one frozen description."""

import copy
import dataclasses
import inspect
import itertools
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from .backport import model_class

CONFIG_FIELDS = frozenset(field.name for field in dataclasses.fields(TransformerConfig))
HAS_MTP = hasattr(gpt_layer_specs, "get_gpt_mtp_block_spec")
HAS_MUP = "use_mup" in CONFIG_FIELDS
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Shape:
    """What a model of the suite is; hashable, so that examples share built models."""

    tied: bool = False
    vocab: int = 97
    layers: int = 2
    hidden: int = 32
    mtp: int = 0
    mup: bool = False
    packed: bool = False
    dtype: torch.dtype = torch.float64
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    pre_process: bool = True
    post_process: bool = True
    recompute: bool = False
    positions: str = "rope"
    seed: int = 0


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """Torch's norm with the mark that Megatron's sequence parallelism wants on its parameters."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class PackedAttention(DotProductAttention):
    """Core attention that runs the rows of a packed batch one by one; the local one refuses packed batches."""

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params=None, **kwargs):
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, *args, **kwargs)
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        boundaries = (padded if padded is not None else packed_seq_params.cu_seqlens_q).tolist()
        rows = []
        for start, end in itertools.pairwise(boundaries):
            if start < end:
                q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
                row = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                rows.append(row[0].transpose(0, 1))
        return torch.cat(rows).reshape(query.shape[0], -1)


def config_for(shape: Shape, **overrides: Any) -> TransformerConfig:
    """The configuration of a shape; dropout off, no fused kernels that need extensions."""
    settings = {
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
    return TransformerConfig(**(settings | overrides))


def layer_spec(shape: Shape):
    """Local (torch-only) layer spec with the parts that the local spec lacks plugged in."""
    layer = copy.deepcopy(gpt_layer_specs.get_gpt_layer_local_spec())
    if shape.packed:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    if not shape.sequence_parallel:
        return layer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelLayerNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * (shape.layers // shape.pp), layer_norm=SequenceParallelLayerNorm
    )


def build(shape: Shape, *, cls: type | None = None, **overrides: Any) -> torch.nn.Module:
    """A fresh model; same shape and seed, same parameters."""
    torch.manual_seed(shape.seed)
    config = config_for(shape, **overrides)
    spec = layer_spec(shape)
    extra = {}
    if shape.mtp:
        mtp_layer = spec.layer_specs[0] if isinstance(spec, TransformerBlockSubmodules) else spec
        extra["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, mtp_layer, use_transformer_engine=False
        )
        if not shape.post_process:
            extra["mtp_block_spec"] = None
    model = (cls or model_class())(
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
    with torch.no_grad():  # spread the logits: near-uniform distributions would hide wrong pairings
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                parameter.mul_(20)
    return model.to(device=DEVICE, dtype=shape.dtype)


@lru_cache(maxsize=32)
def shared(shape: Shape) -> torch.nn.Module:
    """A model that examples share: they must leave it as they found it (a fixture checks that)."""
    return build(shape)


@dataclass(frozen=True)
class Batch:
    """Inputs of one call. ``labels`` are independent of ``ids``, so a wrong pairing shows."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ids, self.positions, self.mask


def batch_for(vocab: int, batch: int, seq: int, seed: int = 0) -> Batch:
    """A random batch: ids and labels ``[batch, seq]``, causal mask ``[1, 1, seq, seq]``."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, vocab, (batch, seq), generator=generator).to(DEVICE) for _ in range(2))
    positions = torch.arange(seq, device=DEVICE)[None].expand(batch, seq)
    mask = torch.tril(torch.ones(1, 1, seq, seq, device=DEVICE)).lt(0.5)
    return Batch(ids, positions, mask, labels)


def half_chain(model: torch.nn.Module) -> torch.nn.Module:
    """The real ``DDP(Float16Module(model))`` of bf16 training, around a copy of the model's config."""
    config = copy.deepcopy(model.config)
    config.bf16, config.params_dtype = True, torch.bfloat16
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return DistributedDataParallel(config, ddp_config, Float16Module(config, model))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The language model inside the suite's own wrapper chains."""
    while not hasattr(model, "compute_language_model_loss"):
        model = model.language_model if hasattr(model, "language_model") else model.module
    return model


def _has_megatron_fsdp() -> bool:
    """Whether the release has a Megatron-FSDP that can train the suite's model, unfused too.

    0.14 and 0.15.0 read a table of meshes that torch 2.11 lacks. 0.15.1 to 0.15.3 put a view in front of every module,
    and the local attention masks its scores in place; later ones say in the code that they keep clear of that.
    """
    from importlib.util import find_spec

    from torch.distributed import device_mesh

    spec = find_spec("megatron.core.distributed.fsdp")
    if spec is None:
        return False
    sources = Path(spec.origin).parent / "src/megatron_fsdp"
    meshes, wrapper = (sources / name for name in ("utils.py", "megatron_fsdp.py"))
    finds_meshes = "_get_root_mesh" in meshes.read_text() or hasattr(
        device_mesh._mesh_resources, "child_to_root_mapping"
    )
    return finds_meshes and "being modified in-place" in wrapper.read_text()


def features() -> frozenset[str]:
    """What this release (or backport) has, found by looking, as names for the ``since`` marker."""
    found = {"mtp"} if HAS_MTP else set()
    if HAS_MUP:
        found.add("mup")
    if "output_processor" in inspect.signature(model_class().forward).parameters:
        found.add("hook")
    if "output_processor" in inspect.signature(GPTModel.forward).parameters:
        found.add("upstream_hook")  # in the release's own model, not only in a backport's
    if hasattr(model_class(), "build_schedule_plan"):
        found.add("schedule_plan")
    if _has_megatron_fsdp():
        found.add("megatron_fsdp")
    return frozenset(found)


def release_mode(subject) -> str | None:
    """The mode that the subject finds on a plain model of this release; None when it has no modes."""
    if "mode" not in subject.capabilities:
        return None
    return subject.mode(shared(Shape()))
