"""Training under Megatron-FSDP, which shards parameters, gradients and optimiser state in buffers of its own."""

import contextlib
import importlib
import re
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from support.models import DEVICE, Shape, build
from support.ranks.gradient_accumulation import accumulation_extension
from support.ranks.sharded import MODES, batches, loss_of, mesh_of_this_device, outputs, own_rank
from support.ranks.sharded_jobs import STEPS, whole_training
from support.subjects import load_subject, patched

_PACKAGE = "megatron.core.distributed.fsdp"
_RATE = 1e-3


def _rearrange(tensor, pattern, **sizes):
    """``einops.rearrange`` as far as the adapter's meshes of ranks need it; einops is not a dependency of Megatron."""
    left, right = pattern.split("->")
    axes = re.findall(r"\w+", left)
    if "(" in left:
        tensor = tensor.reshape([sizes.get(axis, -1) for axis in axes])
    at = {axis: place for place, axis in enumerate(axes)}
    groups = [re.findall(r"\w+", group) for group in re.findall(r"\([^)]*\)|\w+", right)]
    shape = [torch.Size(tensor.shape[at[axis]] for axis in group).numel() for group in groups]
    return tensor.permute([at[axis] for group in groups for axis in group]).reshape(shape)


@contextlib.contextmanager
def _on_this_host(adapter):
    """Einops where it is missing; on a CPU host a mesh of CPU ranks and a number for the current device."""
    if not adapter.HAVE_EINOPS:
        adapter.HAVE_EINOPS, adapter.einops = True, SimpleNamespace(rearrange=_rearrange)
    current = torch.cuda.current_device
    if DEVICE.type == "cpu":
        torch.cuda.current_device = lambda: 0  # it is written into a device's name
    try:
        with mesh_of_this_device(adapter):
            yield
    finally:
        torch.cuda.current_device = current


@contextlib.contextmanager
def _accumulation_allowed(adapter):
    """With gradient accumulation fusion the adapter wants a Transformer Engine of 2.10, whose layers are not used here.

    Megatron's own layers take the buffer that the wrapper hands out (``tensor_parallel/layers.py``, ``get_main_grad``).
    """
    asked = getattr(adapter, "is_te_min_version", None)
    adapter.is_te_min_version = lambda *_, **__: True
    try:
        yield
    finally:
        adapter.is_te_min_version = asked


def megatron_fsdp(model: torch.nn.Module, strategy: str) -> torch.nn.Module:
    """Megatron's own wrapper around a model."""
    adapter = importlib.import_module(f"{_PACKAGE}.mcore_fsdp_adapter")
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        check_for_nan_in_grad=False,
        gradient_reduce_div_fusion=False,  # gloo cannot scale while it sums
    )
    device = DEVICE if DEVICE.type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    with _on_this_host(adapter), _accumulation_allowed(adapter):
        return adapter.FullyShardedDataParallel(model.config, config, model, device=device)


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def _descend(chain):
    with torch.no_grad():
        for _, parameter in chain.param_and_grad_buffer.optimizer_named_parameters:
            if parameter.grad is not None:
                _local(parameter).sub_(_local(parameter.grad), alpha=_RATE)
                parameter.grad = None
    chain.module.install_optimized_model_weights()


def _training(subject, shape, strategy, mode, **config):
    model = build(shape, **config)
    batch, chain, curve = batches(shape)[own_rank()], megatron_fsdp(model, strategy), []
    for _ in range(STEPS):
        chain.zero_grad_buffer()
        loss = loss_of(*outputs(subject, chain, model, batch, mode), batch.labels)
        loss.backward()
        chain.finish_grad_sync()
        _descend(chain)
        curve.append(loss.item())
    return {"curve": curve}


def megatron_fsdp_job(shape: Shape, strategy: str):
    """Losses of five SGD steps on this rank's batch, of the whole model and of each mode under the wrapper."""
    subject = load_subject()
    found = {mode: _training(subject, shape, strategy, mode) for mode in MODES}
    return found | {"whole": {"curve": whole_training(shape)}}


def accumulating_fsdp_job(shape: Shape, strategy: str):
    """The same with weight gradients that every layer adds to the wrapper's buffer by itself."""
    subject = load_subject()
    with accumulation_extension():
        found = {mode: _training(subject, shape, strategy, mode, gradient_accumulation_fusion=True) for mode in MODES}
    return found | {"whole": {"curve": whole_training(shape)}}


def refused_calls_job(shape: Shape, strategy: str):
    """What two calls of the wrapped model raise whose outputs its root could not see: {mode: (error, error)}.

    A processor handed to the model directly, without the library's way through wrappers; hidden states asked for.
    """
    return {mode: _refused_calls(shape, strategy, mode) for mode in ("auto", "legacy")}


def _refused_calls(shape, strategy, mode):
    from mcore_fused import FusedOutputProcessorContext, call_fused_forward, fused_output_processor

    model, errors = build(shape), []
    batch, chain = batches(shape)[own_rank()], megatron_fsdp(model, strategy)
    with patched(load_subject(), chain, mode):
        for call, asking in (
            (chain, {"output_processor": fused_output_processor}),
            (partial(call_fused_forward, chain), {"context": FusedOutputProcessorContext(return_hidden_states=True)}),
        ):
            errors += _error_of(partial(call, *batch.inputs, labels=batch.labels, **asking))
    return errors


def _error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the check looks at it
        return [f"{type(error).__name__}: {error}"]
    return []
