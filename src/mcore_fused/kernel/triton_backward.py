"""Plain Triton kernels of the backward: coefficients a row, dlogits of a chunk, the label's column.

``d loss / d logit = p * (a + b * log2 p) + [label] * g``; everything that depends on the row alone (both upstream
gradients, the temperature, entropy, ignored rows) is folded into a, b, g and lse by the first kernel, so that the
others are the same for every case. No atomics anywhere: repeated runs are bit-equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mcore_fused.kernel.triton_forward import LN2, VARYING, load_rows, unit_at

__all__ = ["coefficients_kernel", "dlogits_kernel", "kept_kernel", "label_kernel", "scale_kernel"]

_LN2 = tl.constexpr(LN2)
_FLOOR = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["N", "ignore_index", "g1_stride", "g2_stride"])
def coefficients_kernel(
    labels,
    lse2,
    entropy2,
    target,
    g1,
    g2,
    g1_stride,
    g2_stride,
    row_scale,
    scale,
    out,
    N,
    ignore_index,
    BLOCK: tl.constexpr,
    HAS_G1: tl.constexpr,
    HAS_G2: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """``out[4, N]`` = lse (base 2; +inf where nothing flows), a, b, g. ``scale`` here has no log2 e in it."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    label = tl.load(labels + rows, mask=inside, other=ignore_index)
    lse = tl.load(lse2 + rows, mask=inside, other=float("inf"))
    e = tl.load(entropy2 + rows, mask=inside, other=0.0)
    raw = tl.load(target + rows, mask=inside, other=0.0)
    up1 = tl.zeros((BLOCK,), tl.float32)
    up2 = tl.zeros((BLOCK,), tl.float32)
    if HAS_G1:
        up1 = tl.load(g1 + rows.to(tl.int64) * g1_stride, mask=inside, other=0.0).to(tl.float32)
    if HAS_G2:
        up2 = tl.load(g2 + rows.to(tl.int64) * g2_stride, mask=inside, other=0.0).to(tl.float32)
    factor = scale
    if PER_ROW:
        factor = tl.load(row_scale + rows, mask=inside, other=1.0) * _LN2
    dead = (label == ignore_index) | ((up1 == 0) & (up2 == 0))
    g = up1 * factor
    b = -up2 * factor * _LN2
    a = tl.where(up2 == 0, 0.0, b * e) - g
    # a label outside the vocabulary (NaN target) passes its poison on where its log-prob is used; a NaN row always
    poisoned = ((raw != raw) & (up1 != 0)) | (lse != lse)
    a = tl.where(poisoned, float("nan"), a)
    tl.store(out + rows, tl.where(dead, float("inf"), lse), mask=inside)
    tl.store(out + N + rows, tl.where(dead, 0.0, a), mask=inside)
    tl.store(out + 2 * N + rows, tl.where(dead, 0.0, b), mask=inside)
    tl.store(out + 3 * N + rows, tl.where(dead, 0.0, g), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def dlogits_kernel(
    h,
    w,
    h_stride,
    w_stride,
    row_scale,
    scale,
    coefficients,
    out,
    out_stride,
    N,
    V,
    H,
    first,
    row_blocks,
    tiles,
    steps,
    group,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    PER_ROW: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dlogits of columns ``[first, V)`` to ``out[N, V - first]``, the label's term left out.

    ``out`` is a buffer whose rows are ``out_stride`` apart; what lies between two of its rows is overwritten.
    One flat loop over (tile, k): the store and exp2 of a tile run under the loads of the next one.
    """
    programs = tl.num_programs(0)
    i = 0
    total = tl.cdiv(row_blocks * tiles - tl.program_id(0), programs) * steps
    k = steps - 1
    block = 0
    column = 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(total):
        k = tl.where(k == steps - 1, 0, k + 1)
        if k == 0:
            block, column, _first, _end = unit_at(i, tl.program_id(0), programs, row_blocks, tiles, tiles, 0, group)
            i += 1
        x = load_rows(h, h_stride, block * BM, N, k * BK, H, BM, BK, TMA, WIDEN)
        y = load_rows(w, w_stride, first + column * BN, V, k * BK, H, BN, BK, TMA, WIDEN)
        acc = tl.dot(x, y.T, acc, input_precision=PRECISION)
        if k == steps - 1:
            rows = block * BM + tl.arange(0, BM)
            inside = rows < N
            lse = tl.load(coefficients + rows, mask=inside, other=float("inf"))
            a = tl.load(coefficients + N + rows, mask=inside, other=0.0)
            b = tl.load(coefficients + 2 * N + rows, mask=inside, other=0.0)
            if PER_ROW:
                factor = tl.load(row_scale + rows, mask=inside, other=1.0)
            else:
                factor = tl.zeros((BM,), tl.float32) + scale
            lp = tl.maximum(acc * factor[:, None] - lse[:, None], _FLOOR)
            d = tl.exp2(lp) * (a[:, None] + b[:, None] * lp)
            if TMA:
                out.store([block * BM, column * BN], d.to(out.dtype))
            else:
                columns = column * BN + tl.arange(0, BN)
                at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
                tl.store(at, d.to(out.dtype.element_ty), mask=inside[:, None] & (columns < out_stride)[None, :])
            acc = tl.zeros((BM, BN), tl.float32)


@triton.jit(do_not_specialize=["N", "first", "columns", "out_stride"])
def label_kernel(
    out,
    out_stride,
    labels,
    coefficients,
    target,
    row_scale,
    scale,
    N,
    first,
    columns,
    BLOCK: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """The label's column of a chunk, rounded once: adding to the rounded value would lose g * (1 - p) near p = 1."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    label = tl.load(labels + rows, mask=inside, other=-1).to(tl.int64) - first
    lse = tl.load(coefficients + rows, mask=inside, other=float("inf"))
    a = tl.load(coefficients + N + rows, mask=inside, other=0.0)
    b = tl.load(coefficients + 2 * N + rows, mask=inside, other=0.0)
    g = tl.load(coefficients + 3 * N + rows, mask=inside, other=0.0)
    factor = tl.zeros((BLOCK,), tl.float32) + scale
    if PER_ROW:
        factor = tl.load(row_scale + rows, mask=inside, other=1.0)
    lp = tl.maximum(tl.fma(tl.load(target + rows, mask=inside, other=0.0), factor, -lse), _FLOOR)
    p = tl.exp2(lp)
    # g * (1 - p) as such: as p * a + g it would be the difference of two rounded numbers where p is near 1
    d = g * (1.0 - p) + p * (a + g + b * lp)
    mine = inside & (label >= 0) & (label < columns) & (lse != float("inf"))
    tl.store(out + rows.to(tl.int64) * out_stride + label, d.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["N"])
def kept_kernel(
    kept_p,
    kept_stride,
    kept_base,
    coefficients,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WIDTH: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    """Kept ``exp2(x - base)`` to dlogits, in place, the label's term left out.

    WIDTH: columns that share a base. APPROXIMATE: the hardware's log2, as p itself is rounded to half precision; the
    exact one makes this kernel arithmetic-bound. ``kept_stride`` must stay specialised: without its divisibility
    the accesses are 2 bytes wide and the kernel is ten times slower than the memory.
    """
    column = tl.program_id(0) * BN
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    at_columns = column + tl.arange(0, BN)
    inside = rows < N
    lse = tl.load(coefficients + rows, mask=inside, other=float("inf"))
    a = tl.load(coefficients + N + rows, mask=inside, other=0.0)
    b = tl.load(coefficients + 2 * N + rows, mask=inside, other=0.0)
    base = tl.load(kept_base + (column // WIDTH).to(tl.int64) * N + rows, mask=inside, other=0.0)
    alive = inside & (lse != float("inf"))
    shift = tl.where(alive, base - lse, 0.0)
    at = kept_p + rows.to(tl.int64)[:, None] * kept_stride + at_columns[None, :]
    # to the end of the padded row, not of the columns: its divisibility is known, and so the accesses stay wide
    mask = inside[:, None] & (at_columns < kept_stride)[None, :]
    p = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    lp = tl.maximum(p, 1e-37)
    if APPROXIMATE:
        lp = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [lp], dtype=tl.float32, is_pure=True, pack=1)
    else:
        lp = tl.log2(lp)
    lp += shift[:, None]
    d = tl.where(alive[:, None], p * tl.exp2(shift)[:, None] * (a[:, None] + b[:, None] * lp), 0.0)
    tl.store(at, d.to(kept_p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def scale_kernel(x, factor, count, BLOCK: tl.constexpr):
    """``x *= factor`` in place, by a factor that lives on the device; nothing is read or written where it is 1."""
    value = tl.load(factor).to(tl.float32)
    if value != 1.0:
        blocks = tl.cdiv(count, BLOCK)
        for i in range(tl.program_id(0), blocks, tl.num_programs(0)):
            at = tl.cast(i, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            old = tl.load(x + at, mask=at < count, other=0.0)
            tl.store(x + at, (old.to(tl.float32) * value).to(x.dtype.element_ty), mask=at < count)
