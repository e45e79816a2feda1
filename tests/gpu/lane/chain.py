"""What the GPU checks run on: the real ``DDP(Float16Module(GPTModel))`` of bf16 training, and its float64 twin.

The twin has the same parameters, rounded to bf16 and then held in float64, so that what it computes is the truth that
both the fused and the unfused bf16 path are measured against.
"""

import contextlib
import copy
import importlib.util
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.module import Float16Module
from support.models import DEVICE, Shape, build, config_for, model_class, unwrapped
from support.subjects import patched

from mcore_compat.testing.reference import log_probs_and_entropy, stock_forward

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
SPECS = ("local", "transformer_engine") if HAS_TE else ("local",)
MODES = pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.needs("legacy"))])
TIED = pytest.mark.parametrize("tied", [False, True])
# fp32's own error on values up to some tens.
FP32_NOISE = 1e-5
# Wide enough that a bf16 sum rounds as in practice, and a vocabulary that ends inside a tile.
LANE = Shape(hidden=128, vocab=1003, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Truth:
    """Log-probs and entropy in float64, and how far the unfused bf16 path is from them."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    unfused: object


def bf16_chain(shape, spec="local"):
    """A fresh chain; gradients are summed in fp32, as frameworks do."""
    model = build_on(shape, spec)
    config = copy.deepcopy(model.config)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=False, use_distributed_optimizer=False, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, ddp, Float16Module(config, model))


def build_on(shape, spec):
    """A bare model on the local spec, or on Transformer Engine's where the host has it."""
    if spec == "local":
        return build(shape)
    torch.manual_seed(shape.seed)
    model = model_class()(
        config=config_for(shape),
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=shape.vocab,
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
    )
    return model.to(device=DEVICE, dtype=shape.dtype)


def float64_twin(chain, shape):
    """The chain's model in float64, with the parameters that the chain really has."""
    twin = build(replace(shape, dtype=torch.float64))
    twin.load_state_dict(
        {k: v for k, v in unwrapped(chain).state_dict().items() if k in twin.state_dict()}, strict=False
    )
    return twin


@contextlib.contextmanager
def head_inputs(model):
    """Collects what the head is called with, ``[seq, batch, hidden]`` a call (MTP calls it as well)."""
    seen = []

    def see(_layer, args, kwargs):
        seen.append((args[0] if args else kwargs["input_"]).detach())  # upstream's dev branch gives it by name

    handle = unwrapped(model).output_layer.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def truth_of_the_head(chain, batch, temperature, **inputs):
    """Float64 log-softmax of the very hidden states that the bf16 decoder gives, and the unfused path beside it."""
    model = unwrapped(chain)
    with torch.no_grad(), head_inputs(chain) as seen:
        unfused = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=temperature, **inputs)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    weight = model.output_layer.weight if weight is None else weight
    candidates = [hidden.double() @ weight.detach().double().t() for hidden in seen]
    logits = min(candidates, key=lambda found: rms(found - unfused.logits))
    labels, by_row = batch.labels.transpose(0, 1), temperature
    if isinstance(temperature, torch.Tensor):
        by_row = temperature.transpose(0, 1)
    log_probs, entropy = log_probs_and_entropy(logits, labels, by_row)
    return Truth(log_probs.transpose(0, 1), entropy.transpose(0, 1), unfused)


def fused(subject, chain, batch, mode, temperature=1.0, **inputs):
    """One fused call through the whole chain."""
    with patched(subject, chain, mode):
        return subject.call(chain, *batch.inputs, labels=batch.labels, temperature=temperature, **inputs)


def main_gradients(chain):
    """What DDP's buffers hold after a backward, by name; empties them."""
    found = {
        name: parameter.main_grad.detach().clone()
        for name, parameter in unwrapped(chain).named_parameters()
        if parameter.requires_grad
    }
    chain.zero_grad_buffer()
    return found


def assert_no_worse_outputs(output, truth, labels):
    """Log-probs and entropy of every token with a label: an eighth of the unfused bf16 path's error, and fp32's own."""
    counted = labels != -100
    for name in ("log_probs", "entropy"):
        actual, expected = getattr(output, name), getattr(truth, name)
        assert actual.dtype is torch.float32
        assert actual.shape == expected.shape
        unfused = rms((getattr(truth.unfused, name) - expected)[counted])
        error = rms((actual - expected)[counted])
        assert error <= unfused / 8 + FP32_NOISE, f"{name}: error {error:.3g}, unfused bf16 path {unfused:.3g}"


def assert_no_worse_gradients(subject, shape, batch, mode, loss, temperature=0.7):
    """Every parameter's gradient of ``loss(output)`` through DDP's buffers, against the float64 twin's.

    The fused and the unfused path share the bf16 backward of the model's body, so the errors are alike there; a missing
    term (entropy, tied embedding, a temperature) is larger by orders of magnitude.
    """
    chain = bf16_chain(shape)
    twin, asked = float64_twin(chain, shape), {"labels": batch.labels, "temperature": temperature}
    loss(stock_forward(twin, *batch.inputs, **asked)).backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    loss(stock_forward(chain.module.module, *batch.inputs, **asked)).backward()
    unfused = main_gradients(chain)
    loss(fused(subject, chain, batch, mode, temperature)).backward()
    actual = main_gradients(chain)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = gradient.norm()
        error, allowed = (((found[name] - gradient).norm() / size).item() for found in (actual, unfused))
        # bf16's unit roundoff over the handful of roundings that both paths make.
        assert error <= 1.25 * allowed + 4e-3, f"{name}: relative error {error:.3g}, unfused bf16 path {allowed:.3g}"


def weighted(labels, seed=2):
    """A loss that weighs every token with a label by itself: sums would hide what two tokens exchange."""
    weights = torch.randn(2, *labels.shape, generator=torch.Generator().manual_seed(seed)).to(labels.device)
    weights = weights * (labels != -100)

    def loss(output):
        return (weights[0] * output.log_probs - 0.5 * weights[1] * output.entropy).sum()

    return loss


def rms(difference):
    """Root mean square of a tensor, as a float."""
    return difference.double().square().mean().sqrt().item()
