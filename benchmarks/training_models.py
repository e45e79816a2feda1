"""Real ``GPTModel``s of the training benchmark, and packed batches with prompts, on one or several GPUs."""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "TINY", "Batch", "ModelShape", "build", "make_batch", "start"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; the depth is what fits beside the stock logits, not the published one, where they differ."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    tied: bool = False
    experts: int = 0


MODELS = {
    "0.5b": ModelShape(24, 896, 14, 2, 4864, 151936, tied=True),
    "1.5b": ModelShape(28, 1536, 12, 2, 8960, 151936, tied=True),
    "8b-6layers": ModelShape(6, 4096, 32, 8, 14336, 128256),
    "moe": ModelShape(4, 2048, 16, 4, 1024, 151936, experts=8),
}
TINY = {
    "0.5b": ModelShape(2, 64, 4, 2, 128, 512, tied=True),
    "moe": ModelShape(2, 64, 4, 4, 64, 512, experts=4),
}


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch: every tensor is ``[1, tokens]``, labels are -100 in prompts and at row ends."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    advantages: Tensor
    packed: Any
    counted: int

    @property
    def tokens(self) -> int:
        """Rows of the head."""
        return self.ids.numel()


def start(device: str, tensor_parallel: int) -> None:
    """Process groups; one process needs no launcher, several come from torchrun."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        from mcore_compat.testing.cpu_seam import install_cpu_seam

        install_cpu_seam()
        torch.set_num_threads(1)
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    tp.model_parallel_cuda_manual_seed(0)


def _packed_attention() -> type[nn.Module]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class PackedSdpa(DotProductAttention):
        """Torch's attention inside each packed row, since Megatron's local one refuses packed batches."""

        def forward(self, query, key, value, _mask, *_args, packed_seq_params=None, **_kwargs):
            rows = []
            for first, end in itertools.pairwise(packed_seq_params.boundaries):
                q, k, v = (x[first:end].transpose(0, 1)[None] for x in (query, key, value))
                row = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                rows.append(row[0].transpose(0, 1))
            return torch.cat(rows).reshape(query.shape[0], -1)

    return PackedSdpa


def build(shape: ModelShape, device: str, tensor_parallel: int) -> nn.Module:
    """A bf16 model with random weights and full recompute of its layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "ffn_hidden_size": shape.ffn,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": device == "cpu",
        "tensor_model_parallel_size": tensor_parallel,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    if shape.experts:
        settings |= {"num_moe_experts": shape.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": shape.ffn}
        settings |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
    spec = copy.deepcopy(get_gpt_layer_local_spec(num_experts=shape.experts or None, normalization="RMSNorm"))
    spec.submodules.self_attention.submodules.core_attention = _packed_attention()
    model = GPTModel(
        TransformerConfig(**settings),
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=32768,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
    )
    return model.to(device=device, dtype=torch.bfloat16)


def make_batch(shape: ModelShape, tokens: int, row: int, prompt_share: float, device: str, seed: int = 1) -> Batch:
    """Rows of about ``row`` tokens in one packed batch; the first ``prompt_share`` of each is its prompt."""
    from megatron.core.packed_seq_params import PackedSeqParams

    rng = torch.Generator().manual_seed(seed)
    boundaries = [0]
    while boundaries[-1] < tokens:
        length = int(row * (0.5 + float(torch.rand((), generator=rng))))
        boundaries.append(min(tokens, boundaries[-1] + max(length, 2)))
    ids = torch.randint(0, shape.vocab, (1, tokens), generator=rng)
    labels = torch.roll(ids, -1, 1)
    positions = torch.empty(1, tokens, dtype=torch.int64)
    for first, end in itertools.pairwise(boundaries):
        positions[0, first:end] = torch.arange(end - first)
        labels[0, first : first + int((end - first) * prompt_share)] = -100
        labels[0, end - 1] = -100
    lengths = torch.tensor(boundaries, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in itertools.pairwise(boundaries))
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    packed.boundaries = boundaries
    advantages = torch.randn(1, tokens, generator=rng)
    counted = int((labels != -100).sum())
    return Batch(*(x.to(device) for x in (ids, positions, labels, advantages)), packed, counted)
