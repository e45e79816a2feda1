"""Models with experts: expert parallelism alone, with tensor and sequence parallelism, and with pipeline stages.

Each layout equals stock on one rank: log-probs, entropy and the gradient of every parameter of the whole model, put
together from the ranks' parts.

Error analysis: everything is float64 but the router's softmax, which stock computes in fp32 (unit roundoff 6e-8) on
logits that agree to 1e-15: nearly every rounding falls on the same side, and one that does not is 6e-8 of one token.
"""

from functools import lru_cache

import pytest
from support.models import Shape, batch_for, build
from support.ranks.moe import EXPERTS, gathered, moe_steps, whole_moe_step
from support.ranks.moe_plan import plan_steps, whole_plan_step
from support.subjects import patched

from mcore_compat.testing.ranks import run_ranks
from mcore_compat.testing.reference import assert_same_gradients, gradients, stock_forward

pytestmark = pytest.mark.needs("call", "patch", "float64", "moe", "evidence")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TIED = pytest.mark.parametrize("tied", [False, True])
CLOSE = 1e-7
# Name to (parallel sizes, ranks, data-parallel ranks).
LAYOUTS = {
    "ep 2": ({"ep": 2}, 2, 2),
    "tp 2 with sequence parallelism, ep 2": ({"tp": 2, "ep": 2}, 2, 1),
    "pp 2, ep 2": ({"pp": 2, "ep": 2}, 4, 2),
}
NEEDS = {"tp": "tensor_parallel", "pp": "pipeline"}


def _shape(tied, **sizes):
    return Shape(tied=tied, vocab=96, experts=EXPERTS, sequence_parallel=sizes.get("tp", 1) > 1, **sizes)


@lru_cache(maxsize=8)
def _single(tied, data_ranks):
    return whole_moe_step(_shape(tied), data_ranks)


def _close(actual, expected, what):
    error = (actual - expected).norm().item()
    assert error <= CLOSE * max(1.0, expected.norm().item()), f"{what} differs by {error:.3g}"


@MODES
@TIED
def test_one_rank(subject, mode, tied):
    """The experts' own gradients too; every expert has tokens, or there would be nothing to compare."""
    model, batch = build(_shape(tied)), batch_for(96, 2, 8, seed=4)
    stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    (stock.log_probs.sum() - 0.3 * stock.entropy.sum()).backward()
    expected = gradients(model)
    assert sum(".local_experts." in name for name in expected) == 2 * 2 * EXPERTS
    with patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    (output.log_probs.sum() - 0.3 * output.entropy.sum()).backward()
    _close(output.log_probs, stock.log_probs, "log_probs")
    _close(output.entropy, stock.entropy, "entropy")
    assert_same_gradients(gradients(model), expected, CLOSE)


@TIED
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.needs(*(NEEDS[size] for size in sizes if size in NEEDS)))
        for name, (sizes, _, _) in LAYOUTS.items()
    ],
)
def test_layouts_equal_one_rank(subject, layout, tied):
    """Both modes; each data-parallel rank has rows of its own."""
    sizes, world, data_ranks = LAYOUTS[layout]
    single = _single(tied, data_ranks)
    assert (single["tokens"] > 0).all(), "every expert must have tokens"
    modes = ("auto", "legacy") if "legacy" in subject.capabilities else ("auto",)
    by_rank = run_ranks(moe_steps, _shape(tied, **sizes), modes, single["state"], world=world, **sizes)
    for mode in modes:
        _check([result[mode] for result in by_rank], single, heads=world // sizes.get("pp", 1), mode=mode)


def _check(results, single, *, heads, mode):
    with_head = [result for result in results if "log_probs" in result]
    assert len(with_head) == heads
    assert {result["experts"] for result in results} == {0, 1}
    for result in with_head:
        assert result["evidence"]["kernel_launches"] > 0
        for name in ("log_probs", "entropy"):
            _close(result[name], single[name][result["rows"]], f"{mode}: {name} of rows {result['rows']}")
    found, drift = gathered(results)
    assert drift <= CLOSE, f"{mode}: replicas on tensor-parallel ranks differ by {drift:.3g}"
    assert found.keys() == single["gradients"].keys()
    for name, expected in single["gradients"].items():
        _close(found[name], expected, f"{mode}: {name}")


@pytest.mark.since("schedule_plan")
@pytest.mark.needs("schedule_plan", "legacy")
@TIED
def test_the_schedule_plan_run_whole(tied):
    """All nodes of all layers, dispatch and combine among them: forward, both at once, backward; both modes.

    Experts are over two ranks: upstream's plan frees the inputs of its nodes, and on one rank the dispatcher hands its
    input on. A dense last layer cannot be compared: ``submodule_combine_forward`` alone applies the final norm.
    """
    shape = _shape(tied, ep=2)
    single = whole_plan_step(_shape(tied), 2)
    by_rank = run_ranks(plan_steps, shape, ("auto", "legacy"), single["state"], world=2, ep=2)
    for mode in ("auto", "legacy"):
        results = [result[mode] for result in by_rank]
        for result in results:
            assert result["evidence"]["kernel_launches"] > 0
            for actual, expected in zip(result["outputs"], single["outputs"], strict=True):
                _close(actual, expected[:, result["rows"]], f"{mode}: outputs of rows {result['rows']}")
        found, _ = gathered(results)
        assert found.keys() == single["gradients"].keys()
        for name, expected in single["gradients"].items():
            _close(found[name], expected, f"{mode}: {name}")
