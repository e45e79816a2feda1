"""Training with gradient accumulation fusion: Megatron's layers add weight gradients to ``main_grad`` themselves.

The CUDA extension that does so is replaced by its definition, ``main_grad += grad_output.T @ input``, wherever it is
not installed, which is always so on a CPU. Everything else is Megatron's own code.
"""

import contextlib
import types
import warnings
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import layers

from mcore_compat.testing.reference import log_probs_and_entropy, stock_forward
from support.models import DEVICE, Shape, batch_for, build
from support.ranks.parallel import WEIGHTS
from support.subjects import load_subject, patched

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def _accumulate(total_input, grad_output, main_grad):
    product = grad_output.flatten(0, -2).float().T @ total_input.flatten(0, -2).float()
    main_grad.add_(product.to(main_grad.dtype))


@contextlib.contextmanager
def accumulation_extension():
    """Megatron's extension, or its definition; uninitialised memory holds NaN meanwhile, so that reading it shows."""
    before = {name: getattr(layers, name, None) for name in (_EXTENSION, "_grad_accum_fusion_available")}
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not layers._grad_accum_fusion_available:
        definition = types.SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
        setattr(layers, _EXTENSION, definition)
        layers._grad_accum_fusion_available = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a GPU's libraries warn that they are not deterministic: irrelevant here
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        for name, value in before.items():
            setattr(layers, name, value)


@dataclass(frozen=True)
class Wrapping:
    """How Megatron's DistributedDataParallel is set up."""

    overlap: bool = False
    distributed_optimizer: bool = False
    reduce_in_fp32: bool = True


def wrap(model, wrapping=Wrapping()):
    """The model under Megatron's DistributedDataParallel, with empty gradient buffers."""
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=wrapping.overlap,
        use_distributed_optimizer=wrapping.distributed_optimizer,
        grad_reduce_in_fp32=wrapping.reduce_in_fp32,
    )
    chain = DistributedDataParallel(model.config, config, model)
    chain.train()
    chain.zero_grad_buffer()
    return chain


def _kwargs(shape, batch):
    return {"loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)} if shape.mtp else {}


def _policy_loss(log_probs, entropy, labels):
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, *labels.shape, generator=generator, dtype=torch.float64).to(labels.device)
    return (weights[0] * WEIGHTS[0] * log_probs + weights[1] * WEIGHTS[1] * entropy).sum()


def _micro_batch(subject, shape, model, chain, kind, mode, seed):
    """Forward and backward of one: a policy loss, Megatron's own loss, or a loss of stock logits."""
    batch = batch_for(shape.vocab, 2, 6, seed=seed)
    kwargs = _kwargs(shape, batch)
    if kind == "loss":
        chain(*batch.inputs, labels=batch.labels, **kwargs).sum().backward()
    elif kind == "logits":
        chain(*batch.inputs).double().logsumexp(-1).sum().backward()
    elif mode == "stock":
        logits = stock_forward(model, *batch.inputs, labels=batch.labels, **kwargs).logits
        values = log_probs_and_entropy(logits, batch.labels.T, 0.7)
        _policy_loss(*(value.T for value in values), batch.labels).backward()
    else:
        with patched(subject, chain, mode):
            output = subject.call(chain, *batch.inputs, labels=batch.labels, temperature=0.7, **kwargs)
            _policy_loss(output.log_probs, output.entropy, batch.labels).backward()


def main_grads(model):
    """Each parameter's ``main_grad``, and whether its last gradient was added there by its user."""
    return {
        name: (parameter.main_grad.detach().clone(), parameter.grad_added_to_main_grad)
        for name, parameter in model.named_parameters()
    }


def accumulated(shape: Shape, kinds, mode: str, wrapping=Wrapping()):
    """Gradient buffers after one accumulation step over micro-batches of these kinds."""
    subject = load_subject()
    with accumulation_extension():
        model = build(shape, gradient_accumulation_fusion=True)
        chain = wrap(model, wrapping)
        for seed, kind in enumerate(kinds):
            last = seed == len(kinds) - 1
            with contextlib.nullcontext() if last else chain.no_sync():
                _micro_batch(subject, shape, model, chain, kind, mode, seed)
        chain.finish_grad_sync()
        return main_grads(model)


def pipeline_accumulated(shape: Shape, mode: str):
    """The same for one micro-batch over two pipeline stages, which share the embedding if it is tied."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    subject, batch = load_subject(), batch_for(shape.vocab, 2, 6)
    with accumulation_extension():
        model = build(
            replace(shape, pre_process=stage == 0, post_process=stage == 1), gradient_accumulation_fusion=True
        )
        chain = wrap(model)
        if stage == 0:
            hidden = chain(*batch.inputs)
            torch.distributed.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            torch.distributed.recv(gradient, 1)
            hidden.backward(gradient)
            return main_grads(model)
        received = torch.empty(6, 2, shape.hidden, dtype=shape.dtype, device=DEVICE)
        torch.distributed.recv(received, 0)
        received.requires_grad_()
        model.set_input_tensor(received)
        _micro_batch(subject, shape, model, chain, "policy", mode, 0)
        torch.distributed.send(received.grad, 0)
        return main_grads(model)
