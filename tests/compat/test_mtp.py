"""Multi-token prediction: the main head's outputs are right, and MTP keeps its loss and its gradients.

verl's replaced forward drops the MTP loss silently; a head that mistakes MTP's rolled labels for the model's own
returns plausible numbers.
"""

import pytest
import torch
from support.models import Shape, batch_for, build
from support.subjects import patched

from mcore_compat.testing.reference import assert_same_gradients, gradients, stock_forward

pytestmark = [pytest.mark.needs("call", "float64", "mtp"), pytest.mark.since("mtp")]

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TIED = pytest.mark.parametrize("tied", [False, True])


@pytest.fixture(autouse=True)
def _fresh_loss_tracker():
    """Upstream logs MTP losses into a class-wide tensor that the first model sizes."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()


def _inputs(batch):
    return {"labels": batch.labels, "loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)}


@MODES
@TIED
@pytest.mark.parametrize("depths", [1, 2])
def test_mtp_outputs(subject, mode, tied, depths):
    model, batch = build(Shape(tied=tied, mtp=depths)), batch_for(97, 2, 7)
    with torch.no_grad():
        stock = stock_forward(model, *batch.inputs, temperature=0.7, **_inputs(batch))
        with patched(subject, model, mode):
            fused = subject.call(model, *batch.inputs, temperature=0.7, **_inputs(batch))
    assert torch.allclose(fused.log_probs, stock.log_probs, atol=1e-10)
    assert torch.allclose(fused.entropy, stock.entropy, atol=1e-10)


@MODES
@TIED
def test_mtp_gradients(subject, mode, tied):
    """MTP's own parameters learn from MTP's loss; the main head's gradients are untouched by it.

    Stock computes MTP's loss in fp32 (unit roundoff 6e-8), the subject may compute it in float64: gradients that
    contain it agree to some 1e-6 of their size.
    """
    model, batch = build(Shape(tied=tied, mtp=1)), batch_for(97, 2, 7)
    model.train()
    stock_forward(model, *batch.inputs, **_inputs(batch)).log_probs.sum().backward()
    expected = gradients(model)
    with patched(subject, model, mode):
        subject.call(model, *batch.inputs, **_inputs(batch)).log_probs.sum().backward()
    actual = gradients(model)
    assert any(name.startswith("mtp.") and gradient.any() for name, gradient in actual.items())
    assert_same_gradients(actual, expected, 2e-6)


@MODES
def test_mtp_without_fusion_is_stock(subject, mode):
    """P7 (a): patching must not change what the model returns to callers that do not ask for fusion."""
    model, batch = build(Shape(mtp=1)), batch_for(97, 2, 7)
    with torch.no_grad():
        expected = model(*batch.inputs, **_inputs(batch))
        with patched(subject, model, mode):
            actual = model(*batch.inputs, **_inputs(batch))
    assert torch.equal(actual, expected)


@MODES
def test_mtp_metrics_are_stock(subject, mode):
    """What upstream logs of MTP (its loss; from 0.19 also how many predictions it would accept) stays what it was."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    model, batch = build(Shape(mtp=1, vocab=2)), batch_for(2, 3, 9)  # two words, so that about half are accepted
    model.train()
    with torch.no_grad():
        found = []
        for fused in (False, True):
            MTPLossLoggingHelper.tracker.clear()
            if fused:
                with patched(subject, model, mode):
                    subject.call(model, *batch.inputs, **_inputs(batch))
            else:
                model(*batch.inputs, **_inputs(batch))
            found.append({k: v for k, v in MTPLossLoggingHelper.tracker.items() if isinstance(v, torch.Tensor)})
    stock, after = found
    assert stock
    assert stock.keys() == after.keys()
    for name, value in stock.items():
        assert torch.allclose(after[name].double(), value.double(), rtol=1e-5), name


@MODES
def test_mtp_with_full_recompute(subject, mode):
    """U2, Megatron-LM#4933: MTP's layers recompute too; a release in which stock cannot is known by name."""
    results = []
    for recompute in (False, True):
        model, batch = build(Shape(mtp=1, recompute=recompute)), batch_for(97, 2, 7)
        model.train()
        if recompute:
            stock_forward(model, *batch.inputs, **_inputs(batch)).log_probs.sum().backward()
            model.zero_grad()
        with patched(subject, model, mode):
            subject.call(model, *batch.inputs, **_inputs(batch)).log_probs.sum().backward()
        results.append(gradients(model))
    assert_same_gradients(results[1], results[0], 1e-12)


@pytest.mark.needs("patch", "legacy", "library")
def test_mtp_loss_follows_the_callers_settings(subject):
    """Legacy mode computes MTP's loss too: padded columns of the head are left out of it and get no gradient."""
    import mcore_fused

    model, batch = build(Shape(mtp=1)), batch_for(90, 2, 7)
    model.train()
    context = mcore_fused.FusedOutputProcessorContext(vocab_size=90)
    with patched(subject, model, "legacy"):
        output = mcore_fused.call_fused_forward(model, *batch.inputs, context=context, **_inputs(batch))
    (output.log_probs * 0).sum().backward()  # only MTP's own loss reaches the head
    gradient = model.output_layer.weight.grad
    assert gradient[:90].any()
    assert not gradient[90:].any()
