"""Tensor, sequence and pipeline parallelism on real process groups equal one rank: outputs and all gradients."""

from functools import lru_cache

import pytest
import torch
from support.models import Shape
from support.ranks.parallel import pipeline_step, tensor_parallel_step, whole_head_step, whole_model_step

from mcore_compat.testing.ranks import run_ranks

pytestmark = pytest.mark.needs("call", "patch", "float64")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TIED = pytest.mark.parametrize("tied", [False, True])
# float64 sums in another order: some hundred roundings of 1.1e-16, relative to the size of the whole gradient.
CLOSE = 1e-11


@lru_cache(maxsize=16)
def _single(tied, mtp=0):
    return run_ranks(whole_model_step, Shape(tied=tied, vocab=96, mtp=mtp), "stock")[0]


@lru_cache(maxsize=4)
def _single_rank(tied):
    return run_ranks(tensor_parallel_step, Shape(tied=tied, vocab=96), "stock")[0]


def _assert_close(actual, expected, what, tolerance=CLOSE):
    error = (actual - expected).norm().item()
    assert error <= tolerance * max(1.0, expected.norm().item()), f"{what} differs by {error:.3g}"


@pytest.mark.needs("tensor_parallel", "evidence")
@MODES
@TIED
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(mode, tied, sequence_parallel):
    """K10, L9, FACTS of the field: the hidden gradient must be reduced with and without sequence parallelism."""
    shape = Shape(tied=tied, vocab=96, tp=2, sequence_parallel=sequence_parallel)
    single, ranks = _single_rank(tied), run_ranks(tensor_parallel_step, shape, mode, world=2, tp=2)
    for rank, result in enumerate(ranks):
        _assert_close(result["log_probs"], single["log_probs"], f"log_probs of rank {rank}")
        _assert_close(result["entropy"], single["entropy"], f"entropy of rank {rank}")
        hidden = single["hidden_gradient"]
        if sequence_parallel:
            hidden = hidden.chunk(2, dim=0)[rank]
        _assert_close(result["hidden_gradient"], hidden, f"hidden gradient of rank {rank}")
        assert result["evidence"]["kernel_launches"] > 0
    assert ranks[0]["gradients"].keys() == single["gradients"].keys()
    for name, (expected, _, _) in single["gradients"].items():
        parts = [result["gradients"][name] for result in ranks]
        _, split, partial = parts[0]
        if split is not None and split >= 0:
            whole = torch.cat([gradient for gradient, _, _ in parts], dim=split)
        elif partial:  # Megatron sums these over the group after backward
            whole = sum(gradient for gradient, _, _ in parts)
        else:
            _assert_close(parts[1][0], parts[0][0], f"{name} between the ranks")
            whole = parts[0][0]
        _assert_close(whole, expected, name)


@pytest.mark.needs("pipeline", "mode")
@MODES
@TIED
def test_pipeline_parallel(mode, tied):
    """K16, P8: with tied weights and two stages the last one owns a copy; its gradient is half of the story."""
    single = _single(tied)
    first, last = run_ranks(pipeline_step, Shape(tied=tied, vocab=96, pp=2), mode, single["state"], world=2, pp=2)
    _check_pipeline(single, first, last, tied, CLOSE)


@pytest.mark.needs("pipeline", "mode", "mtp")
@pytest.mark.since("mtp")
@MODES
@TIED
def test_pipeline_parallel_with_mtp(mode, tied):
    """Tied, two stages, MTP: the head's own weight is allocated and unused; reading it is silent garbage.

    MTP's loss is fp32 in stock (unit roundoff 6e-8): gradients that contain it agree to some 1e-6.
    """
    single = _single(tied, mtp=1)
    first, last = run_ranks(
        pipeline_step, Shape(tied=tied, vocab=96, pp=2, mtp=1), mode, single["state"], world=2, pp=2
    )
    _check_pipeline(single, first, last, tied, 2e-6)


def _check_pipeline(single, first, last, tied, tolerance):
    _assert_close(last["log_probs"], single["log_probs"], "log_probs")
    _assert_close(last["entropy"], single["entropy"], "entropy")
    shared = "embedding.word_embeddings.weight"
    both = {}
    for stage, result in enumerate((first, last)):
        for name, (gradient, _, _) in result["gradients"].items():
            whole = name
            if name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                whole = f"decoder.layers.{int(index) + stage}.{rest}"
            elif name == "output_layer.weight" and tied:
                whole = shared
            both[whole] = both[whole] + gradient if whole in both else gradient
    assert both.keys() == single["gradients"].keys()
    for name, (expected, _, _) in single["gradients"].items():
        _assert_close(both[name], expected, name, tolerance)


def test_the_cell_s_ranks_can_meet_at_any_time():
    """NCCL meets at a group's first collective, through the store that the session's start left behind."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set("cell", "here")
    assert store.get("cell") == b"here"


@pytest.mark.needs("tensor_parallel", "legacy")
@pytest.mark.since("layer_group")
@MODES
def test_the_head_has_a_group_of_its_own(mode):
    """The vocabulary is split over the layer's group, whatever the global one is."""
    for rank, result in enumerate(run_ranks(whole_head_step, mode, world=2, tp=2)):
        for name, (actual, expected) in result.items():
            _assert_close(actual, expected, f"{name} of rank {rank}")
