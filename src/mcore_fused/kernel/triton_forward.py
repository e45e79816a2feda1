"""Plain Triton kernels of the forward: statistics of row blocks, and the kernel that combines them.

Logits are handled in base 2 (``x = logit * scale / temperature * log2 e``), because the hardware's exponential is
``exp2``. The main loop never looks at labels: the label's logit is a dot product that the combining kernel gathers.
Operands come through TMA descriptors or, where alignment forbids those, through pointers: the same kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "combine_kernel", "statistics_kernel"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
_LN2 = tl.constexpr(LN2)
# Meets p = 0 in a product where the logit is -inf: 0 * -inf would be NaN.
_FLOOR = tl.constexpr(-1.0e30)

# Sizes that vary between calls are never specialised: one compilation serves every N, V and split count.
VARYING = ["N", "V", "row_blocks", "tiles", "splits", "tail", "steps", "first", "kept", "group", "ignore_index"]


@triton.jit
def unit_count(program, programs, row_blocks, splits, tail):
    """How many units a program has: runs, and tails where it has a run less than others (see schedule.Split)."""
    runs = row_blocks * splits
    mine = (runs - program + programs - 1) // programs
    first_spare = runs % programs
    spare = programs - first_spare
    has_tails = (tail > 0) & (program >= first_spare) & (program - first_spare < row_blocks)
    tails = tl.where(has_tails, (row_blocks - (program - first_spare) + spare - 1) // spare, 0)
    return mine + tails


@triton.jit
def unit_at(i, program, programs, row_blocks, tiles, splits, tail, group):
    """The program's unit number ``i`` -> (row block, piece, first tile, end tile).

    Row blocks run fastest inside a group, so that the programs in flight share a group's row blocks and few weight
    tiles in L2.
    """
    runs = row_blocks * splits
    mine = (runs - program + programs - 1) // programs
    unit = program + i * programs
    width = group * splits
    first_block = (unit // width) * group
    size = max(min(row_blocks - first_block, group), 1)
    block = first_block + (unit % width) % size
    piece = (unit % width) // size
    body = tiles - tail
    first = (piece * body) // splits
    end = ((piece + 1) * body) // splits
    first_spare = runs % programs
    spare = programs - first_spare
    is_tail = i >= mine
    block = tl.where(is_tail, program - first_spare + (i - mine) * spare, block)
    piece = tl.where(is_tail, splits, piece)
    first = tl.where(is_tail, body, first)
    end = tl.where(is_tail, tiles, end)
    return block, piece, first, end


@triton.jit
def load_rows(
    x, stride, first_row, row_end, k, H, ROWS: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr
):
    """``[ROWS, DEPTH]`` of a row-major matrix; outside it 0. WIDEN: the interpreter multiplies bf16 wrongly."""
    if TMA:
        tile = x.load([first_row, k])
    else:
        rows = first_row + tl.arange(0, ROWS)
        columns = k + tl.arange(0, DEPTH)
        inside = (rows < row_end)[:, None] & (columns < H)[None, :]
        tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit(do_not_specialize=VARYING)
def statistics_kernel(
    h,
    w,
    h_stride,
    w_stride,
    row_scale,
    scale,
    statistics,
    kept_p,
    kept_stride,
    kept_base,
    kept,
    N,
    V,
    H,
    row_blocks,
    tiles,
    splits,
    tail,
    steps,
    group,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    PER_ROW: tl.constexpr,
    KEEP: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Per unit and row: max, sum of p, sum of p * (x - max), to ``statistics[piece, 3, N]``.

    KEEP: p of the first ``kept`` columns goes to ``kept_p`` in the inputs' dtype, its reference to
    ``kept_base[tile, N]``. Rows of ``kept_p`` are padded to ``kept_stride``, a divisible number.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for i in range(unit_count(program, programs, row_blocks, splits, tail)):
        block, piece, tile, tile_end = unit_at(i, program, programs, row_blocks, tiles, splits, tail, group)
        rows = block * BM + tl.arange(0, BM)
        inside = rows < N
        if PER_ROW:
            factor = tl.load(row_scale + rows, mask=inside, other=1.0)
        else:
            factor = tl.zeros((BM,), tl.float32) + scale
        m = tl.full((BM,), -float("inf"), tl.float32)
        s = tl.zeros((BM,), tl.float32)
        b = tl.zeros((BM,), tl.float32)
        for n in range(tile, tile_end):
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(steps):
                x = load_rows(h, h_stride, block * BM, N, k * BK, H, BM, BK, TMA, WIDEN)
                y = load_rows(w, w_stride, n * BN, V, k * BK, H, BN, BK, TMA, WIDEN)
                acc = tl.dot(x, y.T, acc, input_precision=PRECISION)
            if n == tiles - 1:
                acc = tl.where((n * BN + tl.arange(0, BN) < V)[None, :], acc, -float("inf"))
            top = tl.maximum(m, tl.max(acc, 1) * factor)
            base = tl.where(top == -float("inf"), 0.0, top)
            shrink = tl.exp2(m - base)
            d = acc * factor[:, None] - base[:, None]
            p = tl.exp2(d)
            # relative to the max: no scaling pass, and nothing large cancels
            b = tl.where(s > 0, shrink * (b + (m - base) * s), 0.0) + tl.sum(p * tl.maximum(d, _FLOOR), 1)
            s = s * shrink + tl.sum(p, 1)
            m = top
            if KEEP:
                if n * BN < kept:
                    columns = n * BN + tl.arange(0, BN)
                    tl.store(kept_base + n * N + rows, base, mask=inside)
                    at = kept_p + rows.to(tl.int64)[:, None] * kept_stride + columns[None, :]
                    tl.store(at, p.to(kept_p.dtype.element_ty), mask=inside[:, None] & (columns < kept_stride)[None, :])
        out = statistics + piece.to(tl.int64) * 3 * N + rows
        tl.store(out, m, mask=inside)
        tl.store(out + N, s, mask=inside)
        tl.store(out + 2 * N, b, mask=inside)


@triton.jit(do_not_specialize=["N", "V", "pieces", "ignore_index", "label_start"])
def combine_kernel(
    statistics,
    piece_stride,
    pieces,
    labels,
    h,
    w,
    h_stride,
    w_stride,
    row_scale,
    scale,
    merged,
    log_probs,
    entropy,
    lse2,
    entropy2,
    target_out,
    N,
    V,
    H,
    ignore_index,
    label_start,
    PIECES: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    PER_ROW: tl.constexpr,
    DOT: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Combine ``statistics[piece, 3 or 4, N]`` of disjoint vocabulary pieces; ``label_start`` is the first row's id.

    DOT: the label's raw logit (before scale and temperature) is computed here; otherwise it is the pieces' fourth
    number (NaN: this piece does not own the label). FINAL: write the outputs and, in base 2, what the gradient needs;
    otherwise write ``merged[4, N]`` for the other ranks.
    """
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = rows < N
    label = tl.load(labels + rows, mask=inside, other=ignore_index).to(tl.int64)
    piece = tl.arange(0, PIECES)
    at = statistics + piece.to(tl.int64)[:, None] * piece_stride + rows[None, :]
    there = (piece < pieces)[:, None] & inside[None, :]
    m = tl.load(at, mask=there, other=-float("inf"))
    s = tl.load(at + N, mask=there, other=0.0)
    b = tl.load(at + 2 * N, mask=there, other=0.0)
    top = tl.max(m, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    shrink = tl.exp2(m - base[None, :])
    total = tl.sum(s * shrink, 0)
    moment = tl.sum(tl.where(s > 0, shrink * (b + (m - base[None, :]) * s), 0.0), 0)
    if DOT:
        local = label - label_start
        owned = (local >= 0) & (local < V) & (label != ignore_index)
        dot = tl.zeros((BR, BH), tl.float32)
        for k in range(0, H, BH):
            columns = k + tl.arange(0, BH)
            mask = owned[:, None] & (columns < H)[None, :]
            x = tl.load(h + rows.to(tl.int64)[:, None] * h_stride + columns[None, :], mask=mask, other=0.0)
            y = tl.load(w + local[:, None] * w_stride + columns[None, :], mask=mask, other=0.0)
            dot += x.to(tl.float32) * y.to(tl.float32)
        target = tl.where(owned, tl.sum(dot, 1), float("nan"))
    else:
        t = tl.load(at + 3 * N, mask=there, other=float("nan"))
        owned = tl.max((t == t).to(tl.int32), 0) > 0
        target = tl.where(owned, tl.sum(tl.where(t == t, t, 0.0), 0), float("nan"))
    if FINAL:
        factor = tl.zeros((BR,), tl.float32) + scale
        if PER_ROW:
            factor = tl.load(row_scale + rows, mask=inside, other=1.0)
        ignored = label == ignore_index
        log_total = tl.log2(total)
        lse = base + log_total
        e = log_total - moment / total
        # the difference to base first, in one rounding: both may be large where the log-prob is not
        lp = (tl.fma(target, factor, -base) - log_total) * _LN2
        # rounding can carry either output past its bound; the comparisons keep NaN
        lp = tl.where(lp > 0, 0.0, lp)
        e = tl.where(e < 0, 0.0, e)
        tl.store(log_probs + rows, tl.where(ignored, 0.0, lp), mask=inside)
        tl.store(entropy + rows, tl.where(ignored, 0.0, e * _LN2), mask=inside)
        tl.store(lse2 + rows, tl.where(ignored, float("inf"), lse), mask=inside)
        tl.store(entropy2 + rows, tl.where(ignored, 0.0, e), mask=inside)
        tl.store(target_out + rows, target, mask=inside)
    else:
        tl.store(merged + rows, top, mask=inside)
        tl.store(merged + N + rows, total, mask=inside)
        tl.store(merged + 2 * N + rows, moment, mask=inside)
        tl.store(merged + 3 * N + rows, target, mask=inside)
