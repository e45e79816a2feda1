"""Five steps of training: hook and forced legacy are one curve, and it is the unfused path's within its own error."""

from dataclasses import replace

import pytest
from lane.chain import LANE, bf16_chain, float64_twin
from lane.packed import packed_batch
from lane.training import STEPS, advantages_for, train
from support.subjects import patched

from mcore_compat.testing.reference import stock_forward

pytestmark = pytest.mark.needs("call", "patch")


@pytest.mark.parametrize("tied", [False, True])
def test_five_steps_of_policy_gradient(subject, tied):
    """Curves of the hook (or what the release has), forced legacy, the unfused bf16 path, and the float64 truth.

    The unfused path's distance to the truth is bf16's own; the fused path may be that far away, not further. The
    constant is one bf16 rounding of a loss of size one.
    """
    shape = replace(LANE, packed=True, tied=tied)
    batch = packed_batch(shape.vocab, seed=6)
    advantages = advantages_for(batch.labels)
    inputs = {"labels": batch.labels, "temperature": 0.8, "packed_seq_params": batch.params}

    def curve(mode):
        chain = bf16_chain(shape)
        if mode == "unfused":
            return train(chain, batch, lambda: stock_forward(chain.module.module, *batch.inputs, **inputs), advantages)
        if mode == "truth":
            twin = float64_twin(chain, shape)
            return train(twin, batch, lambda: stock_forward(twin, *batch.inputs, **inputs), advantages)
        with patched(subject, chain, mode):
            return train(chain, batch, lambda: subject.call(chain, *batch.inputs, **inputs), advantages)

    auto, unfused, truth = (curve(mode) for mode in ("auto", "unfused", "truth"))
    if "legacy" in subject.capabilities:
        assert auto == curve("legacy"), "hook and forced legacy must be one curve, bit for bit"
    assert len(auto) == STEPS
    assert auto[-1] < auto[0], f"nothing was learned: {auto}"
    error, allowed = (max(abs(a - t) for a, t in zip(found, truth, strict=True)) for found in (auto, unfused))
    assert error <= 2 * allowed + 4e-3, f"fused {auto}, unfused {unfused}, truth {truth}"
