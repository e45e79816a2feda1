"""Warp-specialised kernels for Hopper, in Gluon: the forward's statistics and the backward's dlogits.

Three partitions a program: one warp that only issues TMA loads, and two consumer warpgroups that take 64 rows each of
the same 128x256 tile. Both read the same weight stages, so L2 sees the traffic of one 128x256 tile, but they wait and
release on their own: one may run its softmax while the other still multiplies, and the producer fills the next tile's
stages during both. Plain Triton drains its pipeline at every tile, which costs 1.1 us a tile more. Letting the two
run freely measured better than holding one a fixed number of steps behind.

The arithmetic is that of triton_forward.py and triton_backward.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["COLUMNS", "DEPTH", "ROWS", "STAGES", "STORE_COLUMNS", "hopper_dlogits_kernel", "hopper_statistics_kernel"]

ROWS, COLUMNS, DEPTH, STAGES = 128, 256, 64, 4
STORE_COLUMNS = 128  # a tile leaves in two halves: the ring leaves 16 KiB a warpgroup
# 128 accumulators and an epilogue that does not spill; the producer needs next to nothing
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_FLOOR = gl.constexpr(-1.0e30)
_VARYING = ["N", "V", "row_blocks", "tiles", "splits", "tail", "steps", "first", "kept", "group"]


@gluon.jit
def _unit_count(program, programs, row_blocks, splits, tail):
    """As unit_count in triton_forward.py; Gluon functions call only Gluon functions."""
    runs = row_blocks * splits
    mine = (runs - program + programs - 1) // programs
    first_spare = runs % programs
    spare = programs - first_spare
    has_tails = (tail > 0) & (program >= first_spare) & (program - first_spare < row_blocks)
    tails = gl.where(has_tails, (row_blocks - (program - first_spare) + spare - 1) // spare, 0)
    return mine + tails


@gluon.jit
def _unit_at(i, program, programs, row_blocks, tiles, splits, tail, group):
    """As unit_at in triton_forward.py."""
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
    block = gl.where(is_tail, program - first_spare + (i - mine) * spare, block)
    piece = gl.where(is_tail, splits, piece)
    first = gl.where(is_tail, body, first)
    end = gl.where(is_tail, tiles, end)
    return block, piece, first, end


@gluon.jit
def _load_partition(
    h, w, h_ring, w_ring, full, empty, row_blocks, tiles, splits, tail, steps, first, group, STAGES: gl.constexpr
):
    BN: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = w.block_type.shape[1]
    stage = 0
    phase = 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for i in range(_unit_count(program, programs, row_blocks, splits, tail)):
        block, _piece, tile, tile_end = _unit_at(i, program, programs, row_blocks, tiles, splits, tail, group)
        for n in range(tile, tile_end):
            for k in range(steps):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, (128 + BN) * BK * 2)
                tma.async_copy_global_to_shared(w, [first + n * BN, k * BK], bar, w_ring.index(stage))
                tma.async_copy_global_to_shared(h, [block * 128, k * BK], bar, h_ring.index(2 * stage))
                tma.async_copy_global_to_shared(h, [block * 128 + 64, k * BK], bar, h_ring.index(2 * stage + 1))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def _multiply(
    h_ring,
    w_ring,
    full,
    empty,
    stage,
    phase,
    steps,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    mma: gl.constexpr,
):
    """One 64xBN accumulator over all of H, one multiply in flight; a stage is released one step late.

    The stage to release is computed from ``stage``: Triton 3.6 does not carry a second loop variable that starts as
    the same object, and the kernel would hang.
    """
    acc = gl.zeros([64, BN], gl.float32, mma)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        x = h_ring.index(2 * stage + GROUP)
        acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=k > 0)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
    return acc, stage, phase


@gluon.jit
def _store(half, out, x, row, column):
    """A [64, BN] tile to global memory through shared memory, one half after the other."""
    WIDTH: gl.constexpr = half.shape[1]
    left, right = x.reshape([64, 2, WIDTH]).permute([0, 2, 1]).split()
    tma.store_wait(0)
    half.store(left)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], half)
    tma.store_wait(0)
    half.store(right)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column + WIDTH], half)


@gluon.jit
def _statistics_partition(
    h_ring,
    w_ring,
    half,
    full,
    empty,
    row_scale,
    scale,
    statistics,
    kept_p,
    kept_base,
    kept,
    N,
    V,
    row_blocks,
    tiles,
    splits,
    tail,
    steps,
    group,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    KEEP: gl.constexpr,
    PER_ROW: gl.constexpr,
):
    BN: gl.constexpr = w_ring.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_column: gl.constexpr = gl.SliceLayout(0, mma)
    stage = 0
    phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for i in range(_unit_count(program, programs, row_blocks, splits, tail)):
        block, piece, tile, tile_end = _unit_at(i, program, programs, row_blocks, tiles, splits, tail, group)
        rows = block * 128 + GROUP * 64 + gl.arange(0, 64, by_row)
        inside = rows < N
        if PER_ROW:
            factor = gl.load(row_scale + rows, mask=inside, other=1.0)
        else:
            factor = gl.full([64], 0.0, gl.float32, by_row) + scale
        m = gl.full([64], -float("inf"), gl.float32, by_row)
        s = gl.zeros([64], gl.float32, by_row)
        b = gl.zeros([64], gl.float32, by_row)
        for n in range(tile, tile_end):
            acc, stage, phase = _multiply(h_ring, w_ring, full, empty, stage, phase, steps, BN, STAGES, GROUP, mma)
            if n == tiles - 1:
                columns = n * BN + gl.arange(0, BN, by_column)
                acc = gl.where((columns < V)[None, :], acc, -float("inf"))
            top = gl.maximum(m, gl.max(acc, 1) * factor)
            base = gl.where(top == -float("inf"), 0.0, top)
            shrink = gl.exp2(m - base)
            d = acc * factor[:, None] - base[:, None]
            p = gl.exp2(d)
            b = gl.where(s > 0, shrink * (b + (m - base) * s), 0.0) + gl.sum(p * gl.maximum(d, _FLOOR), 1)
            s = s * shrink + gl.sum(p, 1)
            m = top
            if KEEP:
                if n * BN < kept:
                    gl.store(kept_base + n * N + rows, base, mask=inside)
                    _store(half, kept_p, p.to(kept_p.dtype), block * 128 + GROUP * 64, n * BN)
        out = statistics + piece.to(gl.int64) * 3 * N + rows
        gl.store(out, m, mask=inside)
        gl.store(out + N, s, mask=inside)
        gl.store(out + 2 * N, b, mask=inside)
    if KEEP:
        tma.store_wait(0)


@gluon.jit
def _dlogits_partition(
    h_ring,
    w_ring,
    half,
    full,
    empty,
    row_scale,
    scale,
    coefficients,
    out,
    N,
    row_blocks,
    tiles,
    splits,
    tail,
    steps,
    group,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PER_ROW: gl.constexpr,
):
    BN: gl.constexpr = w_ring.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    stage = 0
    phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for i in range(_unit_count(program, programs, row_blocks, splits, tail)):
        block, _piece, tile, tile_end = _unit_at(i, program, programs, row_blocks, tiles, splits, tail, group)
        rows = block * 128 + GROUP * 64 + gl.arange(0, 64, by_row)
        inside = rows < N
        lse = gl.load(coefficients + rows, mask=inside, other=float("inf"))
        a = gl.load(coefficients + N + rows, mask=inside, other=0.0)
        b = gl.load(coefficients + 2 * N + rows, mask=inside, other=0.0)
        if PER_ROW:
            factor = gl.load(row_scale + rows, mask=inside, other=1.0)
        else:
            factor = gl.full([64], 0.0, gl.float32, by_row) + scale
        for n in range(tile, tile_end):
            acc, stage, phase = _multiply(h_ring, w_ring, full, empty, stage, phase, steps, BN, STAGES, GROUP, mma)
            lp = gl.maximum(acc * factor[:, None] - lse[:, None], _FLOOR)
            d = gl.exp2(lp) * (a[:, None] + b[:, None] * lp)
            _store(half, out, d.to(out.dtype), block * 128 + GROUP * 64, n * BN)
    tma.store_wait(0)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 2)
    return full, empty


@gluon.jit(do_not_specialize=_VARYING)
def hopper_statistics_kernel(
    h,
    w,
    row_scale,
    scale,
    statistics,
    kept_p,
    kept_base,
    kept,
    N,
    V,
    row_blocks,
    tiles,
    splits,
    tail,
    steps,
    group,
    STAGES: gl.constexpr,
    KEEP: gl.constexpr,
    PER_ROW: gl.constexpr,
    num_warps: gl.constexpr,  # noqa: ARG001  (read by the launcher)
):
    """``statistics[piece, 3, N]``; ``h`` in blocks of 64 x DEPTH, ``w`` of COLUMNS x DEPTH, ``kept_p`` of 64 x 128."""
    h_ring = gl.allocate_shared_memory(h.dtype, [2 * STAGES, 64, h.block_type.shape[1]], h.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_type.shape[0], w.block_type.shape[1]], w.layout)
    if KEEP:
        half0 = gl.allocate_shared_memory(kept_p.dtype, [64, kept_p.block_type.shape[1]], kept_p.layout)
        half1 = gl.allocate_shared_memory(kept_p.dtype, [64, kept_p.block_type.shape[1]], kept_p.layout)
    else:
        half0 = h_ring
        half1 = h_ring
    full, empty = _barriers(STAGES)
    # fmt: off
    gl.warp_specialize([
        (_statistics_partition, (h_ring, w_ring, half0, full, empty, row_scale, scale, statistics, kept_p, kept_base,
                                 kept, N, V, row_blocks, tiles, splits, tail, steps, group, STAGES, gl.constexpr(0),
                                 KEEP, PER_ROW)),
        (_statistics_partition, (h_ring, w_ring, half1, full, empty, row_scale, scale, statistics, kept_p, kept_base,
                                 kept, N, V, row_blocks, tiles, splits, tail, steps, group, STAGES, gl.constexpr(1),
                                 KEEP, PER_ROW)),
        (_load_partition, (h, w, h_ring, w_ring, full, empty, row_blocks, tiles, splits, tail, steps, 0, group,
                           STAGES)),
    ], [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])
    # fmt: on


@gluon.jit(do_not_specialize=_VARYING)
def hopper_dlogits_kernel(
    h,
    w,
    row_scale,
    scale,
    coefficients,
    out,
    N,
    first,
    row_blocks,
    tiles,
    splits,
    tail,
    steps,
    group,
    STAGES: gl.constexpr,
    PER_ROW: gl.constexpr,
    num_warps: gl.constexpr,  # noqa: ARG001  (read by the launcher)
):
    """Dlogits of the columns from ``first`` on, as many as ``out`` is wide; the label's term is left out."""
    h_ring = gl.allocate_shared_memory(h.dtype, [2 * STAGES, 64, h.block_type.shape[1]], h.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_type.shape[0], w.block_type.shape[1]], w.layout)
    half0 = gl.allocate_shared_memory(out.dtype, [64, out.block_type.shape[1]], out.layout)
    half1 = gl.allocate_shared_memory(out.dtype, [64, out.block_type.shape[1]], out.layout)
    full, empty = _barriers(STAGES)
    # fmt: off
    gl.warp_specialize([
        (_dlogits_partition, (h_ring, w_ring, half0, full, empty, row_scale, scale, coefficients, out, N, row_blocks,
                              tiles, splits, tail, steps, group, STAGES, gl.constexpr(0), PER_ROW)),
        (_dlogits_partition, (h_ring, w_ring, half1, full, empty, row_scale, scale, coefficients, out, N, row_blocks,
                              tiles, splits, tail, steps, group, STAGES, gl.constexpr(1), PER_ROW)),
        (_load_partition, (h, w, h_ring, w_ring, full, empty, row_blocks, tiles, splits, tail, steps, first, group,
                           STAGES)),
    ], [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])
    # fmt: on
