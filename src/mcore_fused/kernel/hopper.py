"""Launches of the Gluon kernels. Imported only where gluon_support.py enables or tests them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mcore_fused.kernel.hopper_kernels import (
    COLUMNS,
    DEPTH,
    ROWS,
    STAGES,
    STORE_COLUMNS,
    hopper_dlogits_kernel,
    hopper_statistics_kernel,
)
from mcore_fused.kernel.schedule import GROUP, Split, ceil_div, plan_split

__all__ = ["COLUMNS", "dlogits", "statistics"]

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    # made once: making one takes as long as a small kernel
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _ELEMENT[dtype])


def _descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    shape, strides = list(matrix.shape), list(matrix.stride())
    return TensorDescriptor(matrix, shape, strides, [rows, columns], _layout(rows, columns, matrix.dtype))


def statistics(
    hidden: Tensor,
    weight: Tensor,
    row_scale: Tensor | None,
    scale: float,
    out: Tensor,
    real_rows: int,
    kept: tuple[Tensor, Tensor] | None,
    split: Split,
    programs: int,
) -> None:
    """Fill ``out`` ``[pieces, 3, N]``; ``kept`` is the exponentials and their base, both to be written."""
    tokens, width = hidden.shape
    row_blocks, tiles = ceil_div(tokens, ROWS), ceil_div(real_rows, COLUMNS)
    kept_p, kept_base = (hidden, out) if kept is None else kept
    hopper_statistics_kernel[(min(programs, row_blocks * split.pieces),)](
        _descriptor(hidden, ROWS // 2, DEPTH),
        _descriptor(weight, COLUMNS, DEPTH),
        out if row_scale is None else row_scale,
        scale,
        out,
        _descriptor(kept_p, ROWS // 2, STORE_COLUMNS),
        kept_base,
        0 if kept is None else kept_p.shape[1],
        tokens,
        real_rows,
        row_blocks,
        tiles,
        split.count,
        split.tail,
        ceil_div(width, DEPTH),
        GROUP,
        STAGES,
        kept is not None,
        row_scale is not None,
        num_warps=4,
    )


def dlogits(
    hidden: Tensor,
    weight: Tensor,
    row_scale: Tensor | None,
    scale: float,
    coefficients: Tensor,
    out: Tensor,
    first: int,
    programs: int,
) -> None:
    """Fill ``out`` ``[N, columns]`` with the gradient of the logits from column ``first`` on."""
    tokens, width = hidden.shape
    row_blocks, tiles = ceil_div(tokens, ROWS), ceil_div(out.shape[1], COLUMNS)
    split = plan_split(row_blocks, tiles, programs)
    hopper_dlogits_kernel[(min(programs, row_blocks * split.pieces),)](
        _descriptor(hidden, ROWS // 2, DEPTH),
        _descriptor(weight, COLUMNS, DEPTH),
        coefficients if row_scale is None else row_scale,
        scale,
        coefficients,
        _descriptor(out, ROWS // 2, STORE_COLUMNS),
        tokens,
        first,
        row_blocks,
        tiles,
        split.count,
        split.tail,
        ceil_div(width, DEPTH),
        GROUP,
        STAGES,
        row_scale is not None,
        num_warps=4,
    )
