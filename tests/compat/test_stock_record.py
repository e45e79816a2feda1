"""What unpatched megatron-core computes on fixed weights and inputs, written down for the gate.

The gate compares the records of baseline and candidate: stock that computes something else is reported, whether or
not the subject agrees with it. The weights depend on the parameters' names and shapes alone, so that another order of
initialisation changes the record of initial weights and no other.

Error analysis: everything is float64 on one thread. Another order of summation changes a sum of n terms by at most
n u of its size (u = 2^-53); with at most 1e4 terms that is below 1e-11. The record keeps nine digits.
"""

import zlib

import pytest
import torch
from support import facts
from support.models import Shape, batch_for

from mcore_compat.testing import models as tiny
from mcore_compat.testing.reference import gradients, stock_forward

VOCAB = 97
SHAPES = {"a dense model": Shape(), "tied weights": Shape(tied=True), "a mixture of experts": Shape(experts=4)}
DIGITS = 9


def rounded(values):
    return tuple(float(f"{float(value):.{DIGITS}g}") for value in values)


def norms(tensors):
    """L2 norm by name, in the order of the names."""
    return [tensors[name].double().norm() for name in sorted(tensors)]


def fill(model):
    """Weights that depend on names and shapes only; those of norms are near one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            one = "norm" in name and name.endswith("weight")
            parameter.copy_(values + 1 if one else values)
    return model


def record(name, shape):
    batch = batch_for(VOCAB, 2, 6)
    initial = dict(tiny.build(shape).named_parameters())
    found = []
    for _ in range(2):
        model = fill(tiny.build(shape))
        stock = stock_forward(model, *batch.inputs, labels=batch.labels)
        (stock.loss.sum() + stock.entropy.sum()).backward()
        found.append((rounded(stock.log_probs.flatten()[:8]), rounded(norms(gradients(model)))))
    assert found[0] == found[1], "the record is not the same when it is made again"
    log_probs, sizes = found[0]
    assert all(value < 0 for value in log_probs)
    assert any(sizes)
    facts.record_stock(f"log-probs of {name}", log_probs)
    facts.record_stock(f"gradient norms of {name}", sizes)
    facts.record_stock(f"initial weights of {name}", rounded(norms(initial)))


@pytest.mark.parametrize("name", SHAPES)
def test_stock_is_recorded(name):
    record(name, SHAPES[name])


@pytest.mark.since("mtp")
def test_stock_with_mtp_is_recorded():
    record("multi-token prediction", Shape(mtp=1))


@pytest.mark.since("mup")
def test_stock_with_mup_is_recorded():
    record("MuP", Shape(mup=True))
