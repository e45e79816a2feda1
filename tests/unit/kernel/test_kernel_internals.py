"""Schedules, chunk plans, the torch path's own chunks, dispatch without an interpreter, counters."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_properties import Case, check

from mcore_fused.kernel import launches, schedule, torch_backend
from mcore_fused.kernel.problem import ieee_fp32_products
from mcore_fused.kernel.schedule import Split, kept_columns, makespan, plan_chunks, plan_split, walk


@given(
    row_blocks=st.integers(1, 300),
    tiles=st.integers(1, 700),
    programs=st.sampled_from([1, 3, 108, 132]),
    cut=st.one_of(st.none(), st.tuples(st.integers(1, 40), st.integers(0, 40))),
)
@settings(max_examples=60, deadline=None)
def test_every_tile_is_done_once_and_the_makespan_is_not_underestimated(row_blocks, tiles, programs, cut) -> None:
    if cut is None:
        split = plan_split(row_blocks, tiles, programs)
    else:
        count = min(cut[0], tiles)
        split = Split(count, min(cut[1], tiles - count))
    work = walk(row_blocks, tiles, split, programs)
    done = sorted((block, first, end) for program in work for block, _, first, end in program)
    for block in range(row_blocks):
        mine = [(first, end) for b, first, end in done[block * split.pieces : (block + 1) * split.pieces] if b == block]
        assert len(mine) == split.pieces
        assert mine[0][0] == 0
        assert mine[-1][1] == tiles
        assert all(a[1] == b[0] for a, b in pairwise(mine))
        assert all(first < end for first, end in mine)
    pieces = {(block, piece) for program in work for block, piece, _, _ in program}
    assert len(pieces) == row_blocks * split.pieces
    busiest = max(sum(end - first + 0.1 for _, _, first, end in program) for program in work)
    assert busiest <= makespan(row_blocks, tiles, split, programs) + 1e-6


@pytest.mark.parametrize(("row_blocks", "tiles"), [(8, 594), (64, 75), (32, 125), (128, 594), (64, 594), (64, 501)])
def test_the_benchmark_shapes_are_cut_within_three_percent_of_an_even_share(row_blocks, tiles) -> None:
    split = plan_split(row_blocks, tiles, 132)
    assert makespan(row_blocks, tiles, split, 132) <= 1.03 * row_blocks * tiles / 132


@given(
    tokens=st.integers(1, 20000),
    rows=st.integers(1, 160000),
    width=st.integers(1, 8192),
    item=st.sampled_from([2, 4]),
    budget=st.integers(0, 1 << 31),
    workspace=st.integers(0, 1 << 30),
)
@settings(max_examples=200, deadline=None)
def test_chunks_cover_the_vocabulary_once_within_the_budget(tokens, rows, width, item, budget, workspace) -> None:
    kept = kept_columns(tokens, rows, item, budget)
    assert kept == rows or kept % 256 == 0
    assert kept * tokens * item <= budget
    chunks = plan_chunks(tokens, kept, rows, width, item, workspace, reusable=kept)
    ends = [kept, *(end for _, end in chunks.ranges)]
    assert [first for first, _ in chunks.ranges] == ends[:-1]
    assert ends[-1] == rows
    assert all(end - first <= chunks.columns for first, end in chunks.ranges)
    assert chunks.accumulate == (len(chunks.ranges) > 1 or bool(chunks.ranges and kept))
    # a chunk is never narrower than 256 columns, nor than the kept memory that it reuses, nor than a quarter of the
    # budget where the fp32 accumulator eats it; it rounds up to 256
    if chunks.columns > max(512, kept + 256):
        assert chunks.columns * tokens * item <= workspace + 256 * tokens * item


@pytest.mark.parametrize("chunk_bytes", [1, 200, 4096])
def test_k15_the_torch_path_is_right_for_any_chunk(monkeypatch, chunk_bytes) -> None:
    monkeypatch.setattr(torch_backend, "CHUNK_BYTES", chunk_bytes)
    for three_d in (False, True):
        check(Case(tokens=5, width=3, rows=7, three_d=three_d, dtype=torch.float64), "cpu", "torch")


def test_tf32_switch_is_put_back_after_an_error() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(ZeroDivisionError), ieee_fp32_products():
            _ = 1 / (matmul.fp32_precision != "ieee")
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_an_unknown_path_is_not_counted() -> None:
    with pytest.raises(ValueError, match="unknown kernel path"):
        launches.record_launch("cuda")


def test_a_cpu_without_the_interpreter_takes_torch_and_imports_no_triton() -> None:
    code = """
import sys, torch
from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel import kernel_launches, linear_cross_entropy
arguments = torch.ones(2, 8), torch.ones(20, 8), torch.ones(2, dtype=torch.int64)
linear_cross_entropy(*arguments)
assert kernel_launches().torch == 1
assert "triton" not in sys.modules and "torch._dynamo" not in sys.modules
try:
    linear_cross_entropy(*arguments, backend="triton")
except CallArgumentError as error:
    assert "TRITON_INTERPRET" in str(error)
else:
    raise AssertionError
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


@given(st.integers(0, 20000), st.integers(1, 160_000), st.sampled_from([2, 4]), st.integers(0, 1 << 31))
@settings(max_examples=200, deadline=None)
def test_token_chunks_cover_every_token_once_inside_the_budget(tokens, rows, itemsize, budget) -> None:
    pieces = schedule.token_chunks(tokens, rows, itemsize, budget)
    assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == tokens
    assert all(end > first for first, end in pieces) or (tokens == 0 and pieces == [(0, 0)])
    largest = max(end - first for first, end in pieces)
    token_bytes = rows * itemsize + schedule.ceil_div(rows, 256) * 4
    assert largest <= schedule.TOKEN_STEP or largest * token_bytes <= budget


def test_token_chunks_are_multiples_of_512_where_the_budget_allows() -> None:
    """cuBLAS' product of 1664 rows takes 30% longer than that of 1536."""
    pieces = schedule.token_chunks(8192, 151936, 2, 512 << 20)
    assert sorted(end - first for first, end in pieces) == [1024, 1024, 1536, 1536, 1536, 1536]
    assert len(schedule.token_chunks(8192, 128256, 2, 512 << 20)) == 4
