"""The counter of materialised logits, on plain torch."""

import pytest
import torch

from mcore_compat.testing.logits import LogitsCounter, LogitsMaterialisedError

TOKENS, VOCAB, HIDDEN = 64, 300, 8


def _operands():
    return torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN, requires_grad=True)


def _counter():
    return LogitsCounter(tokens=TOKENS, vocab=VOCAB)


def _in_pieces(hidden, weight, pieces):
    return sum(torch.logsumexp(part @ weight.T, -1).sum() for part in hidden.chunk(pieces))


@pytest.mark.parametrize("pieces", [1, 2])
def test_whole_and_half_logits_are_found(pieces):
    with _counter() as counter:
        _in_pieces(*_operands(), pieces)
    with pytest.raises(LogitsMaterialisedError, match=r"aten\.mm\.default -> \[\d+, 300\]"):
        counter.check()


def test_chunks_weights_and_their_gradients_are_not():
    hidden, weight = _operands()
    with _counter() as counter:
        _in_pieces(hidden, weight, 8).backward()
    counter.check()
    assert weight.grad.shape == (VOCAB, HIDDEN)
    assert counter.largest == TOKENS // 8 * VOCAB


def test_logits_of_the_backward_are_found():
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.save_for_backward(hidden, weight)
            return hidden.sum()

        @staticmethod
        def backward(ctx, gradient):
            hidden, weight = ctx.saved_tensors
            return gradient * (hidden @ weight.T).sum() * torch.ones_like(hidden), None

    with _counter() as counter:
        loss = Late.apply(*_operands())
        assert not counter.found
        loss.backward()
    assert counter.found


def test_flat_logits_are_found():
    with _counter() as counter:
        torch.zeros(TOKENS * VOCAB)
    assert counter.found
