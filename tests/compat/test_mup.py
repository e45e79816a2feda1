"""MuP: the output multiplier is applied once, before the temperature, in both modes (K12; verl: in neither)."""

import pytest
import torch
from support.models import Shape, batch_for, build
from support.subjects import patched

from mcore_compat.testing.reference import assert_same_gradients, gradients, log_probs_and_entropy, stock_forward

pytestmark = [pytest.mark.needs("call", "float64", "mup"), pytest.mark.since("mup")]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("multiplier", [0.5, 0.02, 3.0])
def test_mup_multiplier(subject, mode, tied, multiplier):
    model, batch = build(Shape(tied=tied, mup=True), mup_output_mult=multiplier), batch_for(97, 2, 5)
    assert model.config.mup_output_mult == multiplier
    stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=0.6)
    unscaled, _ = log_probs_and_entropy(stock.logits / multiplier, batch.labels.transpose(0, 1), 0.6)
    assert not torch.allclose(unscaled.transpose(0, 1), stock.log_probs, atol=1e-3)  # the multiplier matters here
    stock.log_probs.sum().backward()
    expected = gradients(model)
    with patched(subject, model, mode):
        fused = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.6)
        fused.log_probs.sum().backward()
    assert torch.allclose(fused.log_probs, stock.log_probs, atol=1e-10)
    assert torch.allclose(fused.entropy, stock.entropy, atol=1e-10)
    assert_same_gradients(gradients(model), expected, 1e-9)


@pytest.mark.needs("patch", "legacy")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_multiplier_is_read_in_every_call(subject, mode):
    """A multiplier that changes after patching, and after the first call, is that of the next call."""
    model, batch = build(Shape(mup=True)), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, model, mode):
        for multiplier in (0.5, 3.0):
            model.config.mup_output_mult = multiplier
            fused = subject.call(model, *batch.inputs, labels=batch.labels)
            stock = stock_forward(
                build(Shape(mup=True), mup_output_mult=multiplier), *batch.inputs, labels=batch.labels
            )
            assert torch.allclose(fused.log_probs, stock.log_probs, atol=1e-10)
