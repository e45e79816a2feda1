"""The logits never exist: no operation of a fused forward and backward makes a tensor as large as them.

The batch has 512 tokens and the vocabulary 12,007 words, so that nothing else comes near: the weight and its gradient
hold a sixteenth, the attention scores a twentieth, and the torch path's chunks of 16 MB a third of the logits' numbers.
A half counts, so logits that are made in two pieces are found as well.
"""

import pytest
import torch
from support.models import Shape, batch_for, build
from support.models.packed import Rows
from support.subjects import patched

from mcore_compat.testing.logits import LogitsCounter, LogitsMaterialisedError

pytestmark = pytest.mark.needs("call", "patch")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
VOCAB, ROWS, SEQ = 12_007, 4, 128
TOKENS = ROWS * SEQ


def _counter(vocab=VOCAB):
    return LogitsCounter(tokens=TOKENS, vocab=vocab)


def _case(vocab=VOCAB, **features):
    return build(Shape(vocab=vocab, layers=1, **features)), batch_for(vocab, ROWS, SEQ)


@MODES
@pytest.mark.parametrize("tied", [False, True])
def test_forward_and_backward(subject, mode, tied):
    model, batch = _case(tied=tied)
    with patched(subject, model, mode), _counter() as counter:
        output = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.7)
        (output.log_probs.sum() - 0.3 * output.entropy.sum()).backward()
    counter.check()
    assert counter.largest >= TOKENS * 32, "the counter saw no operation of the model"


@pytest.mark.needs("mup")
@pytest.mark.since("mup")
@MODES
def test_forward_and_backward_with_mup(subject, mode):
    model, batch = _case(mup=True)
    with patched(subject, model, mode), _counter() as counter:
        output = subject.call(model, *batch.inputs, labels=batch.labels)
        output.log_probs.sum().backward()
    counter.check()


@pytest.mark.needs("mtp", "library")
@pytest.mark.since("mtp")
def test_forward_and_backward_with_mtp(subject):
    """In legacy mode the depths of MTP are fused, too; in hook mode upstream computes their logits itself.

    The acceptance count of 0.19 takes its maximum over chunks of 64 MB, so the vocabulary is larger here.
    """
    vocab = 40_009
    model, batch = _case(vocab, mtp=1)
    model.train()
    loss_mask = torch.ones_like(batch.labels, dtype=torch.float32)
    with patched(subject, model, "legacy"), _counter(vocab) as counter:
        output = subject.call(model, *batch.inputs, labels=batch.labels, loss_mask=loss_mask)
        output.log_probs.sum().backward()
    counter.check()


@pytest.mark.needs("factories")
@MODES
def test_jagged_forward_function(mode):
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    nested = Rows.of(VOCAB, (SEQ,) * ROWS).nested
    model = build(Shape(vocab=VOCAB, layers=1, packed=True))
    with _counter() as counter:
        output = fused_forward_no_padding_gen(mode=mode)(model, nested, nested, {}, 0.7, True, 0)
        output["log_probs"].values().sum().backward()
    counter.check()


def test_the_counter_sees_the_stock_logits():
    """Without this, the checks above could pass because the counter is blind."""
    model, batch = _case()
    with torch.no_grad(), _counter() as counter:
        model(*batch.inputs)
    with pytest.raises(LogitsMaterialisedError, match=r"The logits were materialised: aten\..*12007"):
        counter.check()
