"""HybridModel and MambaModel: no known release gives them the hook; the deferred head serves them all the same."""

import inspect

import pytest
import torch
from support.models import Shape, batch_for
from support.models.hybrid import build_hybrid
from support.subjects import patched

from mcore_compat.testing.reference import assert_same_gradients, gradients, stock_forward

pytestmark = pytest.mark.needs("patch", "mode", "float64", "hybrid")


@pytest.mark.parametrize("tied", [False, True])
def test_hybrid_model(subject, tied):
    """A10, SkyRL#1886: 0.19 sends new models to HybridModel, whose forward rejects the hook's keywords."""
    model, batch = build_hybrid(Shape(tied=tied)), batch_for(97, 2, 6)
    # A release that gives them the hook is served through it; which one did is in the contract.
    hooked = "output_processor" in inspect.signature(type(model).forward).parameters
    assert subject.mode(model) == ("hook" if hooked else "legacy")
    stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    (stock.log_probs.sum() - stock.entropy.sum()).backward()
    expected = gradients(model)
    before = dict(vars(model))
    with patched(subject, model):
        fused = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.7)
        (fused.log_probs.sum() - fused.entropy.sum()).backward()
        with torch.no_grad():
            logits = model(*batch.inputs)
    assert torch.allclose(fused.log_probs, stock.log_probs, atol=1e-10)
    assert torch.allclose(fused.entropy, stock.entropy, atol=1e-10)
    assert_same_gradients(gradients(model), expected, 1e-9)
    assert torch.equal(logits, stock.logits.transpose(0, 1))
    assert vars(model) == before
