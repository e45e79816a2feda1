"""Launches of the Triton and Gluon kernels: sizes, grids, buffers. One function a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from mcore_fused.kernel.gluon_support import gluon_enabled
from mcore_fused.kernel.operands import Operands, descriptor, tma_readable
from mcore_fused.kernel.schedule import GROUP, Split, Tiles, ceil_div, plan_split
from mcore_fused.kernel.triton_backward import (
    coefficients_kernel,
    dlogits_kernel,
    kept_kernel,
    label_kernel,
    scale_kernel,
)
from mcore_fused.kernel.triton_forward import LN2, combine_kernel, statistics_kernel

__all__ = [
    "FinishedRows",
    "Kept",
    "RowState",
    "coefficients",
    "dlogits",
    "finish",
    "kept_to_dlogits",
    "merge",
    "row_statistics",
    "scale_in_place",
]

# Row stride of buffers that hold a piece of the vocabulary: TMA and wide accesses need aligned rows.
_ROW_STEP = 64
# Widest hidden size at which the Gluon kernel makes the dlogits. It hides a fixed cost a tile, which is 4% of a step at
# 896 and 2% at 2048; at 3584 and 4096 the plain kernel's step was 0 to 5% faster in each of two runs (docs/adr).
_GLUON_DLOGITS_WIDTH = 3072
# The tile of the Gluon kernels (hopper_kernels.py).
HOPPER_TILES = Tiles(128, 256, 64, 12, 4)


@dataclass(frozen=True)
class Kept:
    """Exponentials kept by a forward.

    Attributes:
        p: ``[N, columns]`` of ``exp2(x - base)`` in the inputs' dtype, a view into ``storage``.
        base: ``[tiles, N]`` fp32, base 2.
        width: columns a tile of ``base``.
        storage: the flat memory.
    """

    p: Tensor
    base: Tensor
    width: int
    storage: Tensor

    @property
    def columns(self) -> int:
        """How many vocabulary columns were kept."""
        return self.p.shape[1]


@dataclass(frozen=True)
class RowState:
    """What a backward needs of each row, base 2: labels, lse, entropy; the label's raw logit. All ``[N]``."""

    labels: Tensor
    lse: Tensor
    entropy2: Tensor
    target: Tensor


@dataclass(frozen=True)
class FinishedRows:
    """Outputs in nats, and the row state in base 2. All ``[N]`` fp32."""

    log_probs: Tensor
    entropy: Tensor
    lse: Tensor
    entropy2: Tensor
    target: Tensor


def _precision(operands: Operands) -> str:
    # never the default for fp32, which is TF32 with errors near 1e-3
    return "tf32x3" if operands.hidden.dtype == torch.float32 else "tf32"


def _pair(operands: Operands, tiles: Tiles) -> tuple[Any, Any]:
    if operands.tma:
        return (
            descriptor(operands.hidden, tiles.rows, tiles.depth),
            descriptor(operands.weight, tiles.columns, tiles.depth),
        )
    return operands.hidden, operands.weight


def _scale_arguments(operands: Operands) -> tuple[Tensor, float]:
    return (operands.hidden if operands.row_scale is None else operands.row_scale), operands.scale


def _hopper(operands: Operands) -> bool:
    return operands.tma and not operands.traits.interpreted and gluon_enabled(operands.device, operands.hidden.dtype)


def row_statistics(operands: Operands, kept_columns: int) -> tuple[Tensor, Kept | None, str]:
    """Run the forward's main kernel.

    Returns:
        ``[pieces, 3, N]`` statistics, the kept exponentials or None, and the path that ran.
    """
    tokens = operands.tokens
    fast = _hopper(operands)
    tiles = HOPPER_TILES if fast else operands.tiles
    row_blocks, columns = ceil_div(tokens, tiles.rows), ceil_div(operands.real_rows, tiles.columns)
    split = plan_split(row_blocks, columns, operands.traits.programs)
    statistics = torch.empty((split.pieces, 3, tokens), dtype=torch.float32, device=operands.device)
    kept = _kept_buffers(operands, kept_columns, tiles.columns) if kept_columns else None
    if operands.real_rows == 0:  # a shard of padding rows only: no tile, and statistics that weigh nothing
        statistics.zero_()[:, 0].fill_(-torch.inf)
    elif fast:
        from mcore_fused.kernel import hopper

        hopper.statistics(
            operands.hidden,
            operands.weight,
            operands.row_scale,
            operands.scale,
            statistics,
            operands.real_rows,
            None if kept is None else (kept.p, kept.base),
            split,
            operands.traits.programs,
        )
    else:
        _plain_statistics(operands, statistics, kept, split)
    return statistics, kept, "gluon" if fast else "triton"


def _kept_buffers(operands: Operands, columns: int, width: int) -> Kept:
    tokens = operands.tokens
    stride = ceil_div(columns, _ROW_STEP) * _ROW_STEP
    storage = torch.empty(tokens * stride, dtype=operands.hidden.dtype, device=operands.device)
    base = torch.empty((ceil_div(columns, width), tokens), dtype=torch.float32, device=operands.device)
    return Kept(storage.view(tokens, stride)[:, :columns], base, width, storage)


def _plain_statistics(operands: Operands, statistics: Tensor, kept: Kept | None, split: Split) -> None:
    tokens, hidden_size = operands.hidden.shape
    tiles = operands.tiles
    row_blocks, columns = ceil_div(tokens, tiles.rows), ceil_div(operands.real_rows, tiles.columns)
    h, w = _pair(operands, tiles)
    row_scale, scale = _scale_arguments(operands)
    statistics_kernel[(min(operands.traits.programs, row_blocks * split.pieces),)](
        h,
        w,
        operands.hidden.stride(0),
        operands.weight.stride(0),
        row_scale,
        scale,
        statistics,
        statistics if kept is None else kept.p,
        0 if kept is None else kept.p.stride(0),
        statistics if kept is None else kept.base,
        0 if kept is None else kept.columns,
        tokens,
        operands.real_rows,
        hidden_size,
        row_blocks,
        columns,
        split.count,
        split.tail,
        ceil_div(hidden_size, tiles.depth),
        GROUP,
        BM=tiles.rows,
        BN=tiles.columns,
        BK=tiles.depth,
        TMA=operands.tma,
        PER_ROW=operands.row_scale is not None,
        KEEP=kept is not None,
        WIDEN=operands.traits.interpreted,
        PRECISION=_precision(operands),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _combine(
    operands: Operands, labels: Tensor, pieces: Tensor, outputs: tuple[Tensor, ...], *, dot: bool, final: bool
) -> None:
    tokens, hidden_size = operands.hidden.shape
    row_scale, scale = _scale_arguments(operands)
    count = pieces.shape[0]
    rows = 4
    combine_kernel[(ceil_div(tokens, rows),)](
        pieces,
        pieces.stride(0),
        count,
        labels,
        operands.hidden,
        operands.weight,
        operands.hidden.stride(0),
        operands.weight.stride(0),
        row_scale,
        scale,
        *outputs,
        tokens,
        operands.real_rows,
        hidden_size,
        operands.ignore_index,
        operands.vocab_offset,
        PIECES=8 if count <= 8 else 32 if count <= 32 else max(128, triton.next_power_of_2(count)),
        BR=rows,
        BH=512,
        PER_ROW=operands.row_scale is not None,
        DOT=dot,
        FINAL=final,
        num_warps=4,
    )


def merge(operands: Operands, labels: Tensor, statistics: Tensor) -> Tensor:
    """This rank's ``[4, N]`` (max, sum, moment, label's logit), for the other ranks."""
    merged = torch.empty((4, operands.tokens), dtype=torch.float32, device=operands.device)
    _combine(operands, labels, statistics, (merged,) * 6, dot=True, final=False)
    return merged


def finish(operands: Operands, labels: Tensor, pieces: Tensor, *, dot: bool) -> FinishedRows:
    """Combine all pieces into the outputs and the row state; ``dot``: compute the labels' logits here."""
    outputs = [torch.empty(operands.tokens, dtype=torch.float32, device=operands.device) for _ in range(5)]
    _combine(operands, labels, pieces, (outputs[0], *outputs), dot=dot, final=True)
    return FinishedRows(*outputs)


def coefficients(operands: Operands, rows: RowState, upstream: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """``[4, N]``: lse, a, b, g of each row, from both upstream gradients (any stride, or None)."""
    tokens = operands.tokens
    out = torch.empty((4, tokens), dtype=torch.float32, device=operands.device)
    if tokens == 0:
        return out
    flat = [None if g is None else g.reshape(-1) for g in upstream]
    row_scale, scale = _scale_arguments(operands)
    block = 128
    coefficients_kernel[(ceil_div(tokens, block),)](
        rows.labels,
        rows.lse,
        rows.entropy2,
        rows.target,
        *(rows.lse if g is None else g for g in flat),
        *(0 if g is None else g.stride(0) for g in flat),
        row_scale,
        scale * LN2,
        out,
        tokens,
        operands.ignore_index,
        BLOCK=block,
        HAS_G1=flat[0] is not None,
        HAS_G2=flat[1] is not None,
        PER_ROW=operands.row_scale is not None,
        num_warps=4,
    )
    return out


def dlogits(operands: Operands, rows: RowState, coefficients: Tensor, out: Tensor, first: int, end: int) -> None:
    """Write the gradient of the logits of columns ``[first, end)`` to ``out`` ``[N, end - first]``."""
    if operands.hidden.shape[1] <= _GLUON_DLOGITS_WIDTH and _hopper(operands) and tma_readable(out):
        from mcore_fused.kernel import hopper

        hopper.dlogits(
            operands.hidden,
            operands.weight,
            operands.row_scale,
            operands.scale,
            coefficients,
            out,
            first,
            operands.traits.programs,
        )
    else:
        _plain_dlogits(operands, coefficients, out, first, end)
    _label_column(operands, out, rows, coefficients, first)


def _plain_dlogits(operands: Operands, coefficients: Tensor, out: Tensor, first: int, end: int) -> None:
    tokens, hidden_size = operands.hidden.shape
    tiles = operands.tiles
    row_blocks, columns = ceil_div(tokens, tiles.rows), ceil_div(end - first, tiles.columns)
    tma = operands.tma and tma_readable(out)
    h, w = _pair(operands, tiles) if tma else (operands.hidden, operands.weight)
    row_scale, scale = _scale_arguments(operands)
    dlogits_kernel[(min(operands.traits.programs, row_blocks * columns),)](
        h,
        w,
        operands.hidden.stride(0),
        operands.weight.stride(0),
        row_scale,
        scale,
        coefficients,
        descriptor(out, tiles.rows, tiles.columns) if tma else out,
        out.stride(0),
        tokens,
        end,
        hidden_size,
        first,
        row_blocks,
        columns,
        ceil_div(hidden_size, tiles.depth),
        GROUP,
        BM=tiles.rows,
        BN=tiles.columns,
        BK=tiles.depth,
        TMA=tma,
        PER_ROW=operands.row_scale is not None,
        WIDEN=operands.traits.interpreted,
        PRECISION=_precision(operands),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def kept_to_dlogits(operands: Operands, kept: Kept, rows: RowState, coefficients: Tensor) -> None:
    """Turn kept exponentials into the gradient of their logits, in place."""
    tokens, columns = kept.p.shape
    block_rows, block_columns = 16, min(kept.width, 256)
    kept_kernel[(ceil_div(columns, block_columns), ceil_div(tokens, block_rows))](
        kept.p,
        kept.p.stride(0),
        kept.base,
        coefficients,
        tokens,
        BM=block_rows,
        BN=block_columns,
        WIDTH=kept.width,
        APPROXIMATE=kept.p.is_cuda and kept.p.dtype != torch.float32,
        num_warps=4,
    )
    _label_column(operands, kept.p, rows, coefficients, 0)


def _label_column(operands: Operands, out: Tensor, rows: RowState, coefficients: Tensor, first: int) -> None:
    tokens, columns = out.shape
    row_scale, scale = _scale_arguments(operands)
    block = 128
    label_kernel[(ceil_div(tokens, block),)](
        out,
        out.stride(0),
        rows.labels,
        coefficients,
        rows.target,
        row_scale,
        scale,
        tokens,
        operands.vocab_offset + first,
        columns,
        BLOCK=block,
        PER_ROW=operands.row_scale is not None,
        num_warps=4,
    )


def scale_in_place(value: Tensor, factor: Tensor, programs: int) -> None:
    """Multiply a contiguous tensor by a 0-dim tensor of its device, without reading either where the factor is 1."""
    block = 2048
    if value.numel():
        scale_kernel[(min(4 * programs, ceil_div(value.numel(), block)),)](
            value, factor, value.numel(), BLOCK=block, num_warps=4
        )
