"""Fused outputs and gradients equal those of the model's own logits, in float64.

Error analysis: both sides form the same dot products of length H and a log-sum-exp over V columns in float64
(unit roundoff u = 2^-53), so an output differs by at most about (H + V) u max|logit / temperature|. A gradient
is a sum of products of such numbers; its relative error is bounded by the same factor.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import VOCABS, batches, call_temperatures, shapes
from support.models import Shape, batch_for, build, shared
from support.subjects import patched

from mcore_compat.testing.reference import assert_same_gradients, gradients, stock_forward

pytestmark = pytest.mark.needs("call", "float64")

UNIT_ROUNDOFF = 2.0**-53


def _bound(stock, vocab, temperature):
    lowest = temperature.min().item() if isinstance(temperature, torch.Tensor) else temperature
    return 4 * (32 + vocab) * UNIT_ROUNDOFF * max(1.0, stock.logits.abs().max().item() / lowest)


def _assert_equal(fused, stock, bound):
    for name in ("log_probs", "entropy"):
        actual, expected = getattr(fused, name), getattr(stock, name)
        assert actual.shape == expected.shape
        assert actual.dtype is torch.float64
        difference = (actual - expected).abs().max().item()
        assert difference <= bound, f"{name} differs by {difference:.3g}, bound {bound:.3g}"


@given(data=st.data())
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_outputs(subject, mode, data):
    """verl's flattening without a transpose fails here for every batch above 1; T and MuP are always drawn (M8)."""
    shape = data.draw(shapes())
    model, batch = shared(shape), data.draw(batches(shape.vocab))
    temperature = data.draw(call_temperatures(batch.labels))
    with torch.no_grad():
        stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=temperature)
        with patched(subject, model, mode):
            fused = subject.call(model, *batch.inputs, labels=batch.labels, temperature=temperature)
    _assert_equal(fused, stock, _bound(stock, shape.vocab, temperature))
    # K1: these hold whatever the logits are.
    assert (fused.log_probs <= 0).all()
    assert (fused.entropy >= -1e-12).all()
    assert (fused.entropy <= torch.log(torch.tensor(float(shape.vocab))) + 1e-9).all()


@given(data=st.data())
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_gradients(subject, mode, data):
    """K4: both outputs with weights of their own per token, only one of them used, and exact zeros among them."""
    shape = data.draw(shapes(vocab=data.draw(st.sampled_from(VOCABS[1:]))))
    model, batch = shared(shape), data.draw(batches(shape.vocab))
    temperature = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))
    weights = torch.randn(2, *batch.labels.shape, generator=generator, dtype=torch.float64).to(batch.labels.device)
    used = data.draw(st.sampled_from(["both", "log_probs", "entropy"]))
    if used != "both":
        weights[0 if used == "entropy" else 1] = 0
    if data.draw(st.booleans()):
        weights[:, :, ::2] = 0

    def backward(output):
        parts = {"log_probs": weights[0] * output.log_probs, "entropy": weights[1] * output.entropy}
        sum(part.sum() for name, part in parts.items() if used in {name, "both"}).backward()
        return gradients(model)

    expected = backward(stock_forward(model, *batch.inputs, labels=batch.labels, temperature=temperature))
    with patched(subject, model, mode):
        actual = backward(subject.call(model, *batch.inputs, labels=batch.labels, temperature=temperature))
    assert_same_gradients(actual, expected, 1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_weight_gets_its_gradient(subject, tied):
    """K16: with tied weights and one stage the head has no weight of its own; the embedding must learn from it."""
    model, batch = build(Shape(tied=tied)), batch_for(97, 2, 6)
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    batch.ids.fill_(0)  # rows of the embedding other than 0 can only get a gradient through the head
    with patched(subject, model):
        subject.call(model, *batch.inputs, labels=batch.labels).log_probs.sum().backward()
    gradient = gradients(model)[name]
    assert (gradient[1:].abs().sum(-1) > 0).all()


@pytest.mark.needs("legacy")
@given(data=st.data())
def test_forced_legacy_equals_hook_bit_for_bit(subject, data):
    """One head in two installations: not close, equal, gradients included."""
    shape = data.draw(shapes())
    model, batch = shared(shape), data.draw(batches(shape.vocab))
    results = []
    for mode in ("auto", "legacy"):
        with patched(subject, model, mode):
            output = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.7)
        (output.log_probs.sum() - 0.3 * output.entropy.sum()).backward()
        results.append((output, gradients(model)))
    (auto, auto_gradients), (legacy, legacy_gradients) = results
    assert torch.equal(auto.log_probs, legacy.log_probs)
    assert torch.equal(auto.entropy, legacy.entropy)
    assert_same_gradients(legacy_gradients, auto_gradients, 0.0)


@pytest.mark.needs("ignored_labels")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_ignored_labels_are_exactly_zero(subject, mode):
    """K5: a documented constant, not memory; and no gradient."""
    model, batch = shared(Shape()), batch_for(97, 2, 5)
    batch.labels[:] = -100
    with patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels)
    assert not output.log_probs.any()
    assert not output.entropy.any()
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert all(not gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_outputs_of_a_bf16_model_are_fp32(subject, mode):
    """Float16Module up-casts tuples and lists only, so the library must hand over fp32 itself (P13)."""
    model, batch = shared(Shape(dtype=torch.bfloat16)), batch_for(97, 2, 5)
    with patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels)
    assert output.log_probs.dtype is output.entropy.dtype is torch.float32
