"""MTP's logged metrics with a vocabulary that is sharded over ranks."""

import pytest
import torch
from support.models import Shape
from support.ranks.mtp import mtp_metrics

from mcore_compat.testing.ranks import run_ranks

pytestmark = [pytest.mark.needs("call", "patch", "float64", "mtp", "tensor_parallel"), pytest.mark.since("mtp")]


def test_mtp_metrics_over_tensor_parallel_ranks():
    """The loss, and from 0.19 how many predictions would be accepted: their maximum is over all shards.

    Four words on two ranks, so that about a quarter is accepted and each rank holds the maximum of about half.
    """
    shape = Shape(mtp=1, vocab=4, tp=2)
    for found in run_ranks(mtp_metrics, shape, ("stock", "auto", "legacy"), world=2, tp=2):
        stock = found.pop("stock")
        assert stock
        for mode, metrics in found.items():
            assert metrics.keys() == stock.keys()
            for name, value in stock.items():
                assert torch.allclose(metrics[name].double(), value.double(), rtol=1e-5), f"{mode}: {name}"
