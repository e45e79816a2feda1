"""Packing over two real ranks: outputs and gradients of the whole batch equal those of one rank.

float64 sums in another order: some hundred roundings of 1.1e-16, relative to the size of the whole gradient.
"""

import dataclasses
from functools import lru_cache

import pytest
from support.models import Shape
from support.ranks.packed import contiguous_round_trip, contiguous_step, fused_and_unfused_step, jagged_step

from mcore_compat.testing.ranks import run_ranks

pytestmark = pytest.mark.needs("factories", "float64")

CLOSE = 1e-11
LENGTHS = (6, 1, 0, 9)  # no multiple of 4, one shorter than a rank's two chunks, one empty
TEMPERATURES = (0.5, 2.0, 1.0, 0.9)


def _assert_close(actual, expected, what):
    error = (actual - expected).norm().item()
    assert error <= CLOSE * max(1.0, expected.norm().item()), f"{what} differs by {error:.3g}"


def _has_dynamic_groups():
    from megatron.core.packed_seq_params import PackedSeqParams

    return "local_cp_size" in {field.name for field in dataclasses.fields(PackedSeqParams)}


@lru_cache(maxsize=4)
def _one_rank(shape):
    return run_ranks(jagged_step, shape, LENGTHS, TEMPERATURES, {})[0]


@pytest.mark.parametrize(
    ("tied", "options"),
    [(False, {}), (True, {"pad_to_length_bucket": 32}), (False, {"local_cp_size": 2})],
    ids=["untied", "tied, bucket", "dynamic group"],
)
def test_two_ranks_equal_one(tied, options):
    """L2, L4, L9, K7: rows split in zigzag chunks; every rank gets the batch, each token's gradient counts once."""
    shape = Shape(tied=tied, packed=True)
    split = dataclasses.replace(shape, cp=2)
    if "local_cp_size" in options and not _has_dynamic_groups():
        with pytest.raises(AssertionError, match="dynamic context-parallel groups"):
            run_ranks(jagged_step, split, LENGTHS, TEMPERATURES, options, world=2, cp=2)
        return
    _assert_parts_of_one(run_ranks(jagged_step, split, LENGTHS, TEMPERATURES, options, world=2, cp=2), shape)


def _assert_parts_of_one(ranks, shape):
    expected, gradients = _one_rank(shape)
    for rank, (outputs, _) in enumerate(ranks):
        for name, actual, single in zip(("log_probs", "entropy"), outputs, expected, strict=True):
            _assert_close(actual, single, f"{name} of rank {rank}")
    for name, single in gradients.items():
        # Megatron sums gradients over the context-parallel ranks after backward.
        _assert_close(sum(part[name] for _, part in ranks), single, name)


@pytest.mark.needs("legacy")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_in_the_contiguous_layout_equal_one(tied, mode):
    """The second rank starts inside a row; attention reads the layout from ``cp_partition_mode``.

    Positions are learned: the rotary ones of a release without the field are cut in zigzag chunks.
    """
    shape = Shape(tied=tied, packed=True, positions="learned_absolute")
    split = dataclasses.replace(shape, cp=2)
    _assert_parts_of_one(run_ranks(contiguous_step, split, LENGTHS, TEMPERATURES, mode, world=2, cp=2), shape)


def test_the_contiguous_layout_is_split_and_comes_back_over_real_ranks():
    """P10: the data path of the contiguous layout works; a release whose attention would misread it is refused.

    Which token lies in which slot is proved in the unit tests.
    """
    for rank, (values, refusal) in enumerate(run_ranks(contiguous_round_trip, LENGTHS, world=2, cp=2)):
        assert values.tolist() == list(range(1, 17)), f"rank {rank}"
        assert refusal is None or "cp_partition_mode" in refusal


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_equal_one_fused_and_unfused(sequence_parallel):
    """L4, L9: odd rows over two tensor-parallel ranks; the unfused counterpart gathers the vocabulary's shards."""
    shape = Shape(packed=True, vocab=96)
    split = dataclasses.replace(shape, tp=2, sequence_parallel=sequence_parallel)
    expected, _ = _one_rank(shape)
    for rank, (fused, unfused) in enumerate(
        run_ranks(fused_and_unfused_step, split, LENGTHS, TEMPERATURES, {}, world=2, tp=2)
    ):
        for outputs, gradients in (fused, unfused):
            for name, actual, single in zip(("log_probs", "entropy"), outputs, expected, strict=True):
                _assert_close(actual, single, f"{name} of rank {rank}")
            assert gradients.keys() == fused[1].keys()
            for name, gradient in gradients.items():
                _assert_close(gradient, fused[1][name], f"{name} of rank {rank}")
