"""Models whose parameters are sharded over data-parallel ranks: torch's ``fully_shard`` and Megatron's wrapper of it.

Every rank has a batch of its own. What the ranks must agree with is the same model, whole, on all batches.
"""

import contextlib
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, torch_fully_sharded_data_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mcore_compat.testing.reference import log_probs_and_entropy
from support.models import DEVICE, Shape, batch_for
from support.subjects import patched

MODES = ("stock", "auto", "legacy")
_LOSS = "compute_language_model_loss"


class Head(ColumnParallelLinear):
    """The head under a name of its own: among Transformer Engine's layers it is the only ColumnParallelLinear."""


@dataclass(frozen=True)
class Layout:
    """How a model is cut into units.

    Attributes:
        wrapper: Megatron's ``TorchFullyShardedDataParallel``; otherwise plain ``fully_shard``.
        head: "unit" of its own, in the "root" unit, or in one unit with the final norm ("pair").
        embedding: whether the embedding is a unit of its own.
        reshard: whether units free their weights after the forward.
        cast: whether the units cast parameters and inputs to bf16.
    """

    wrapper: bool = True
    head: str = "unit"
    embedding: bool = True
    reshard: bool = True
    cast: bool = False


@contextlib.contextmanager
def mesh_of_this_device(module):
    """Megatron's wrappers always ask for a mesh of GPUs; on a CPU host they get one of CPU ranks."""
    if DEVICE.type == "cuda":
        yield
        return
    real = module.DeviceMesh

    class Mesh:
        @staticmethod
        def from_group(group, device_type=None, **named):
            del device_type
            return real.from_group(group, "cpu", **named)

    module.DeviceMesh = Mesh
    try:
        yield
    finally:
        module.DeviceMesh = real


def shard(model: torch.nn.Module, layout: Layout) -> torch.nn.Module:
    """Cut a model into units; returns what a framework would hold and call."""
    units = {TransformerLayer}
    if layout.embedding:
        units |= {LanguageModelEmbedding, RotaryEmbedding}
    if layout.head == "unit":
        model.output_layer.__class__ = Head
        units.add(Head)
    whole = Float16Module(model.config, model) if model.config.bf16 else model
    if layout.wrapper:
        config = DistributedDataParallelConfig(overlap_grad_reduce=False)
        config.reshard_after_forward = layout.reshard
        with mesh_of_this_device(torch_fully_sharded_data_parallel):
            return torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel(
                model.config, config, whole, sub_modules_to_wrap=units
            )
    mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), DEVICE.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if layout.cast else MixedPrecisionPolicy()
    options = {"mesh": mesh, "reshard_after_forward": layout.reshard, "mp_policy": policy}
    for module in [m for m in model.modules() if isinstance(m, tuple(units))]:
        fully_shard(module, **options)
    if layout.head == "pair":
        fully_shard([model.decoder.final_layernorm, model.output_layer], **options)
    return fully_shard(whole, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter or gradient, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def head_is_shard(model: torch.nn.Module) -> bool:
    """Whether at the moment this rank holds only a piece of the weight that the head multiplies with."""
    layer = model.output_layer
    return isinstance(model.embedding.word_embeddings.weight if layer.weight is None else layer.weight, DTensor)


def batches(shape: Shape):
    """One batch a data-parallel rank."""
    return [batch_for(shape.vocab, 2, 8, seed=rank) for rank in range(parallel_state.get_data_parallel_world_size())]


def own_rank() -> int:
    """Which of the batches is this rank's."""
    return parallel_state.get_data_parallel_rank()


def temperature_for(batch) -> torch.Tensor:
    """One temperature a token."""
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(batch.labels.shape, generator=generator) + 0.5).to(DEVICE)


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss in which every output counts differently."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, *labels.shape, generator=generator, dtype=torch.float64).to(labels.device)
    return (weights[0] * log_probs - 0.3 * weights[1] * entropy).sum()


def outputs(subject, chain, inner, batch, mode):
    """Log-probs and entropy of one forward through the chain, fused or from stock logits."""
    temperature = temperature_for(batch)
    if mode == "stock":
        return _unfused(chain, inner, batch, temperature)
    with patched(subject, chain, mode):
        output = subject.call(chain, *batch.inputs, labels=batch.labels, temperature=temperature)
    return output.log_probs, output.entropy


def _unfused(chain, inner, batch, temperature):
    """Computed where stock computes its loss, so that the head's unit and the root see a stock forward."""
    stock = getattr(inner, _LOSS)

    def loss(labels, logits):
        if labels is not batch.labels:
            return stock(labels, logits.clone())
        found = log_probs_and_entropy(logits, labels.transpose(0, 1), temperature.transpose(0, 1))
        return torch.stack(found).transpose(1, 2)

    setattr(inner, _LOSS, loss)
    try:
        output = chain(*batch.inputs, labels=batch.labels)
    finally:
        delattr(inner, _LOSS)
    return output.unbind(0)


@contextlib.contextmanager
def hidden_gradients(inner: torch.nn.Module):
    """Gradients of the hidden states under the head, in the order of the backwards."""
    found = []

    def watch(_module, _args, hidden):
        hidden.register_hook(lambda gradient: found.append(gradient.clone()))

    handle = inner.decoder.register_forward_hook(watch)
    try:
        yield found
    finally:
        handle.remove()


def descend(parameters, rate=1e-3):
    """One SGD step; gradients are dropped."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None
