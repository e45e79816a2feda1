"""Calls without labels are stock to the last bit, and labels or temperatures that cannot be right are refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import shapes
from support.models import Shape, batch_for, build, shared
from support.subjects import patched

pytestmark = pytest.mark.needs("call")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


@MODES
@given(data=st.data())
def test_without_labels_logits_are_stock(subject, mode, data):
    """P9, verl#5273: evaluation and generation passes carry no labels."""
    shape = data.draw(shapes())
    model, batch = shared(shape), batch_for(shape.vocab, 2, 5)
    with torch.no_grad():
        expected = model(*batch.inputs)
        with patched(subject, model, mode):
            assert torch.equal(model(*batch.inputs), expected)
            assert torch.equal(subject.call(model, *batch.inputs, labels=None), expected)


@pytest.mark.needs("refusal")
@MODES
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "1", None, True])
def test_temperatures_that_are_none(subject, mode, temperature):
    """K6: a greedy rollout's temperature 0 must not become NaN in training."""
    model, batch = shared(Shape()), batch_for(97, 1, 4)
    with patched(subject, model, mode), pytest.raises((ValueError, TypeError), match="temperature"):
        subject.call(model, *batch.inputs, labels=batch.labels, temperature=temperature)


@pytest.mark.needs("refusal")
@MODES
@pytest.mark.parametrize("bad", [0.0, -2.0, math.nan])
def test_token_temperatures_that_hold_none(subject, mode, bad):
    model, batch = shared(Shape()), batch_for(97, 2, 4)
    temperature = torch.ones(2, 4, dtype=torch.float64, device=batch.labels.device)
    temperature[1, 2] = bad
    with patched(subject, model, mode), pytest.raises(ValueError, match="temperature"):
        subject.call(model, *batch.inputs, labels=batch.labels, temperature=temperature)


@pytest.mark.needs("refusal")
@MODES
@pytest.mark.parametrize(
    "spoil",
    [
        lambda labels: labels[:, :-1],
        lambda labels: labels.transpose(0, 1),
        lambda labels: labels.reshape(-1),
        lambda labels: labels[None],
        lambda labels: labels.double(),
        lambda labels: labels.bool(),
    ],
    ids=["shorter", "transposed", "flat", "deeper", "floating", "boolean"],
)
def test_labels_that_do_not_fit(subject, mode, spoil):
    """L9: labels sliced where hidden states are not, or the other way round, stop before the kernel."""
    model, batch = shared(Shape()), batch_for(97, 2, 5)
    with patched(subject, model, mode), pytest.raises((ValueError, TypeError), match="labels"):
        subject.call(model, *batch.inputs, labels=spoil(batch.labels))


@pytest.mark.needs("refusal")
@MODES
def test_token_temperature_of_another_shape(subject, mode):
    """K7: a per-token temperature is packed as the labels, or refused."""
    model, batch = shared(Shape()), batch_for(97, 2, 5)
    with patched(subject, model, mode), pytest.raises(ValueError, match="temperature"):
        subject.call(model, *batch.inputs, labels=batch.labels, temperature=torch.ones(5, 2))


@pytest.mark.needs("label_range")
@MODES
@pytest.mark.parametrize("label", [97, 98, -1, -101, 2**31 - 1, 2**40])
def test_out_of_range_labels_are_poison(subject, mode, label):
    """K9: never a plausible number, and never a read outside the weight; the other rows are not touched."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, model, mode):
        good = subject.call(model, *batch.inputs, labels=batch.labels)
        batch.labels[1, 3] = label
        bad = subject.call(model, *batch.inputs, labels=batch.labels)
    assert torch.isnan(bad.log_probs[1, 3])
    assert torch.isnan(bad.log_probs).sum() == 1
    assert torch.equal(bad.log_probs[0], good.log_probs[0])


@pytest.mark.needs("patch", "library")
@MODES
def test_positional_labels(subject, mode):
    """The fifth positional argument of every release's forward is ``labels``."""
    model, batch = shared(Shape()), batch_for(97, 2, 5)
    import mcore_fused

    with torch.no_grad(), patched(subject, model, mode):
        by_name = subject.call(model, *batch.inputs, labels=batch.labels)
        by_place = mcore_fused.call_fused_forward(model, *batch.inputs, None, batch.labels)
    assert torch.equal(by_name.log_probs, by_place.log_probs)
