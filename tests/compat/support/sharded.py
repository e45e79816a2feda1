"""Models sharded by torch's ``fully_shard``, as Megatron's wrapper and plain torch lay the units out.

Every rank trains on a batch of its own; what the ranks must agree with is the same model, whole, on all batches.
"""

import contextlib
import itertools
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig, torch_fully_sharded_data_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .models import DEVICE, Shape, batch_for, build
from .reference import log_probs_and_entropy
from .subject import load_subject, patched

STEPS = 5
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
        half: whether the units compute in bf16.
    """

    wrapper: bool = True
    head: str = "unit"
    embedding: bool = True
    reshard: bool = True
    half: bool = False


@contextlib.contextmanager
def _mesh_of_this_device():
    """Megatron's wrapper always asks for a mesh of GPUs; on a CPU host it gets one of CPU ranks."""
    if DEVICE.type == "cuda":
        yield
        return
    real = torch_fully_sharded_data_parallel.DeviceMesh

    class Mesh:
        @staticmethod
        def from_group(group, _kind):
            return real.from_group(group, "cpu")

    torch_fully_sharded_data_parallel.DeviceMesh = Mesh
    try:
        yield
    finally:
        torch_fully_sharded_data_parallel.DeviceMesh = real


def shard(model: torch.nn.Module, layout: Layout) -> torch.nn.Module:
    """Cut a model into units; returns what a framework would hold and call."""
    units = {TransformerLayer}
    if layout.embedding:
        units |= {LanguageModelEmbedding, RotaryEmbedding}
    if layout.head == "unit":
        model.output_layer.__class__ = Head
        units.add(Head)
    if layout.wrapper:
        config = DistributedDataParallelConfig(overlap_grad_reduce=False)
        config.reshard_after_forward = layout.reshard
        with _mesh_of_this_device():
            return torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel(
                model.config, config, model, sub_modules_to_wrap=units
            )
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if layout.half else MixedPrecisionPolicy()
    options = {"mesh": mesh, "reshard_after_forward": layout.reshard, "mp_policy": policy}
    for module in [m for m in model.modules() if isinstance(m, tuple(units))]:
        fully_shard(module, **options)
    if layout.head == "pair":
        fully_shard([model.decoder.final_layernorm, model.output_layer], **options)
    return fully_shard(model, **options)


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def head_weight(model):
    """The parameter that the head multiplies with, as it is stored at the moment."""
    layer = model.output_layer
    return model.embedding.word_embeddings.weight if layer.weight is None else layer.weight


def batches(shape: Shape, world: int):
    """One batch a rank."""
    return [batch_for(shape.vocab, 2, 8, seed=rank) for rank in range(world)]


def loss_of(log_probs, entropy, labels):
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, *labels.shape, generator=generator, dtype=torch.float64).to(labels.device)
    return (weights[0] * log_probs - 0.3 * weights[1] * entropy).sum()


def unfused(chain, inner, batch, temperature):
    """Log-probs and entropy of stock logits, computed where stock computes its loss, through the chain."""
    found = []
    stock = getattr(inner, _LOSS)

    def loss(labels, logits):
        if labels is not batch.labels:
            return stock(labels, logits.clone())
        found.append(log_probs_and_entropy(logits, labels.transpose(0, 1), temperature))
        return torch.stack(found[0]).transpose(1, 2)

    setattr(inner, _LOSS, loss)
    try:
        output = chain(*batch.inputs, labels=batch.labels)
    finally:
        delattr(inner, _LOSS)
    return output.unbind(0)


def _outputs(subject, chain, inner, batch, mode, temperature=0.7):
    if mode == "stock":
        return unfused(chain, inner, batch, temperature)
    with patched(subject, chain, mode):
        output = subject.call(chain, *batch.inputs, labels=batch.labels, temperature=temperature)
    return output.log_probs, output.entropy


def _hidden_gradients(inner, into):
    return inner.decoder.register_forward_hook(
        lambda _module, _args, hidden: hidden.register_hook(lambda gradient: into.append(gradient.clone())) and None
    )


def whole_step(shape: Shape, world: int):
    """The unsharded model on every rank's batch: outputs by rank, gradients as the mean over the ranks."""
    subject, model = load_subject(), build(shape)
    ranks, hidden = [], []
    handle = _hidden_gradients(model, hidden)
    for batch in batches(shape, world):
        log_probs, entropy = _outputs(subject, model, model, batch, "stock")
        loss_of(log_probs, entropy, batch.labels).backward()
        ranks.append({"log_probs": log_probs.detach(), "entropy": entropy.detach()})
    handle.remove()
    for result, gradient in zip(ranks, hidden, strict=True):
        result["hidden_gradient"] = gradient
    return ranks, {name: parameter.grad / world for name, parameter in model.named_parameters()}


def _step(subject, shape, layout, mode, batch):
    """One forward and backward, with what is held of the head's weight before, between and after."""
    model = build(shape)
    chain, hidden = shard(model, layout), []
    handle = _hidden_gradients(model, hidden)
    stored = [isinstance(head_weight(model), DTensor)]
    log_probs, entropy = _outputs(subject, chain, model, batch, mode)
    stored.append(isinstance(head_weight(model), DTensor))
    loss_of(log_probs, entropy, batch.labels).backward()
    stored.append(isinstance(head_weight(model), DTensor))
    handle.remove()
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden_gradient": hidden[0],
        "gradients": {name: _full(parameter.grad) for name, parameter in model.named_parameters()},
        "stored_as_shard": stored,
    }


def train_sharded(subject, shape, layout, mode, batch):
    """Five SGD steps; the losses, and the whole parameters at the end."""
    model = build(shape)
    chain = shard(model, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    curve = []
    for _ in range(STEPS):
        log_probs, entropy = _outputs(subject, chain, model, batch, mode)
        loss = loss_of(log_probs, entropy, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return {"curve": curve, "parameters": {name: _full(p.detach()) for name, p in model.named_parameters()}}


def sharded_job(shape: Shape, layout: Layout):
    """Everything that the checks of one layout look at, from this rank: {"step", "training"} by mode."""
    subject, world = load_subject(), torch.distributed.get_world_size()
    batch = batches(shape, world)[torch.distributed.get_rank()]
    reference, gradients = whole_step(shape, world)
    found = {"reference": reference[torch.distributed.get_rank()] | {"gradients": gradients}}
    for mode, (name, job) in itertools.product(
        ("stock", "auto", "legacy"), (("step", _step), ("training", train_sharded))
    ):
        found[name, mode] = job(subject, shape, layout, mode, batch)
    return found | {"evidence": subject.evidence()}
