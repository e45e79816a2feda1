"""Minus the log-prob at temperature 1 is the loss that stock itself returns.

The reference of the other checks reads the logits on their way into the loss, so it does not see what the loss does to
them. Stock computes its loss in fp32, or in the logits' own precision: 97 terms below 100, some roundings of 6e-8 each.
"""

import pytest
import torch
from support.models import Shape, batch_for, build
from support.subjects import patched

pytestmark = pytest.mark.needs("call", "float64")

CLOSE = 1e-4


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("tied", [False, True])
def test_minus_log_prob_is_the_stock_loss(subject, mode, tied):
    model, batch = build(Shape(tied=tied)), batch_for(97, 2, 7)
    with torch.no_grad():
        loss = model(*batch.inputs, labels=batch.labels)
        with patched(subject, model, mode):
            output = subject.call(model, *batch.inputs, labels=batch.labels)
    assert loss.shape == output.log_probs.shape
    difference = (loss.double() + output.log_probs.double()).abs().max().item()
    assert difference <= CLOSE, f"stock's loss and minus the log-prob differ by {difference:.3g}"
