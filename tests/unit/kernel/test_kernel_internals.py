"""Schedules, chunk plans, the torch path's own chunks, dispatch without an interpreter, counters."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_properties import Case, check

from mcore_fused.kernel import launches, torch_backend
from mcore_fused.kernel.problem import ieee_fp32_products
from mcore_fused.kernel.schedule import kept_columns, plan_chunks, split_count


@given(st.integers(1, 300), st.integers(1, 700), st.sampled_from([3, 108, 132]))
@settings(max_examples=60, deadline=None)
def test_splits_cover_the_tiles(row_blocks: int, tiles: int, programs: int) -> None:
    """Every split has a tile, and together they cover all tiles."""
    splits = split_count(row_blocks, tiles, programs)
    assert 1 <= splits <= tiles
    units = [(s * tiles // splits, (s + 1) * tiles // splits) for s in range(splits)]
    assert units[0][0] == 0
    assert units[-1][1] == tiles
    assert all(a < b for a, b in units)


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
