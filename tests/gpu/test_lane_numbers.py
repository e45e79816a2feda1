"""The fused head in bf16 on the GPU, through the real wrapper chain, against float64 logits.

Error analysis: the kernel multiplies bf16 operands exactly and sums in fp32 (unit roundoff 6e-8); the unfused path does
the same and then rounds every logit to bf16 (unit roundoff 4e-3), which is what its error consists of. The fused error
is therefore bounded by a fraction of the unfused one, plus fp32's own on values up to some tens: 1e-5.
"""

from dataclasses import replace

import pytest
import torch
from lane.chain import LANE, SPECS, bf16_chain, float64_twin, fused, main_gradients, rms, truth_of_the_head
from support.models import HAS_MUP, batch_for
from support.reference import stock_forward
from support.subject import patched

pytestmark = pytest.mark.needs("call", "patch", "legacy", "evidence")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TIED = pytest.mark.parametrize("tied", [False, True])
FP32_NOISE = 1e-5


def _temperature(kind, labels):
    if kind == "number":
        return 0.7
    generator = torch.Generator().manual_seed(5)
    return (torch.rand(labels.shape, generator=generator) + 0.5).to(labels.device)


def _batch(shape):
    batch = batch_for(shape.vocab, 3, 37, seed=1)
    batch.labels[0, 3:5] = -100
    return batch


@MODES
@TIED
@pytest.mark.parametrize("temperature", ["number", "per token"])
@pytest.mark.parametrize("spec", SPECS)
def test_outputs_against_float64_logits(subject, spec, temperature, tied, mode):
    """Log-probs and entropy, three rows (a flattening without a transpose pairs wrong rows), some labels ignored."""
    shape = replace(LANE, tied=tied)
    chain, batch = bf16_chain(shape, spec), _batch(shape)
    temperature = _temperature(temperature, batch.labels)
    truth = truth_of_the_head(chain, batch, temperature)
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, temperature)
    for name in ("log_probs", "entropy"):
        actual, expected = getattr(output, name), getattr(truth, name)
        assert actual.dtype is torch.float32
        assert actual.shape == expected.shape
        unfused = rms(getattr(truth.unfused, name) - expected)
        error = rms(actual - expected)
        assert error <= unfused / 8 + FP32_NOISE, f"{name}: error {error:.3g}, unfused bf16 path {unfused:.3g}"
    assert not output.log_probs[0, 3:5].any()
    assert not output.entropy[0, 3:5].any()


@pytest.mark.since("mup")
@MODES
def test_outputs_with_mup(subject, mode):
    """MuP's multiplier is inside stock's logits and must be inside the fused ones."""
    assert HAS_MUP
    shape = replace(LANE, mup=True)
    chain, batch = bf16_chain(shape), _batch(shape)
    truth = truth_of_the_head(chain, batch, 0.7)
    model = chain.module.module
    scale = model._scale_logits(torch.ones(1)).item()
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, 0.7)
        plain = truth_of_the_head(chain, batch, 0.7 / scale)
    assert scale != 1
    assert rms(output.log_probs - plain.log_probs) <= rms(truth.unfused.log_probs - plain.log_probs) / 8 + FP32_NOISE


@MODES
@TIED
def test_gradients_against_float64(subject, tied, mode):
    """Every parameter's gradient after one backward through DDP's buffers: no worse than the unfused bf16 path's.

    Both paths share the bf16 backward of the model's body, so the errors are alike there; a missing term (entropy,
    tied embedding, a temperature) is larger by orders of magnitude.
    """
    shape = replace(LANE, tied=tied)
    chain, batch = bf16_chain(shape), _batch(shape)
    twin = float64_twin(chain, shape)
    weights = torch.randn(2, *batch.labels.shape, generator=torch.Generator().manual_seed(2)).to(batch.labels.device)

    def loss(output):
        return (weights[0] * output.log_probs - 0.5 * weights[1] * output.entropy).sum()

    loss(stock_forward(twin, *batch.inputs, labels=batch.labels, temperature=0.7)).backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    loss(stock_forward(chain.module.module, *batch.inputs, labels=batch.labels, temperature=0.7)).backward()
    unfused = main_gradients(chain)
    loss(fused(subject, chain, batch, mode, 0.7)).backward()
    actual = main_gradients(chain)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = gradient.norm()
        error, allowed = (((found[name] - gradient).norm() / size).item() for found in (actual, unfused))
        # bf16's unit roundoff over the handful of roundings that both paths make.
        assert error <= 1.25 * allowed + 4e-3, f"{name}: relative error {error:.3g}, unfused bf16 path {allowed:.3g}"


@TIED
def test_forced_legacy_equals_hook_bit_for_bit(subject, tied):
    """One head in two installations, and one kernel whose sums have one order: equal, gradients included."""
    shape = replace(LANE, tied=tied)
    chain, batch = bf16_chain(shape), _batch(shape)
    results = []
    for mode in ("auto", "legacy"):
        output = fused(subject, chain, batch, mode, 0.7)
        (output.log_probs.sum() - 0.3 * output.entropy.sum()).backward()
        results.append((output, main_gradients(chain)))
    (first, first_gradients), (second, second_gradients) = results
    assert torch.equal(first.log_probs, second.log_probs)
    assert torch.equal(first.entropy, second.entropy)
    different = [
        name for name, gradient in first_gradients.items() if not torch.equal(gradient, second_gradients[name])
    ]
    assert not different


@pytest.mark.since("mtp")
@MODES
@TIED
def test_multi_token_prediction(subject, tied, mode):
    """The main head's outputs are right with MTP on, and MTP's own parameters learn from their own loss."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    shape = replace(LANE, tied=tied, mtp=1)
    chain, batch = bf16_chain(shape), batch_for(LANE.vocab, 2, 33, seed=3)
    inputs = {"loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)}
    chain.train()
    truth = truth_of_the_head(chain, batch, 0.7, **inputs)
    stock_forward(chain.module.module, *batch.inputs, labels=batch.labels, **inputs).log_probs.sum().backward()
    expected = main_gradients(chain)
    output = fused(subject, chain, batch, mode, 0.7, **inputs)
    for name in ("log_probs", "entropy"):
        unfused = rms(getattr(truth.unfused, name) - getattr(truth, name))
        assert rms(getattr(output, name) - getattr(truth, name)) <= unfused / 8 + FP32_NOISE
    main_gradients(chain)
    with patched(subject, chain, mode):
        subject.call(chain, *batch.inputs, labels=batch.labels, **inputs).log_probs.sum().backward()
    actual = main_gradients(chain)
    own = [name for name in actual if name.startswith("mtp.")]
    assert own
    for name in own:
        difference = ((actual[name] - expected[name]).norm() / expected[name].norm()).item()
        # Stock's MTP logits are rounded to bf16, ours are not: gradients differ by that rounding.
        assert difference <= 0.1, f"{name}: relative difference {difference:.3g}"
