"""How a call is cut into tiles, splits and chunks: pure arithmetic on sizes, no tensors.

The main kernels are persistent: one program a multiprocessor, each walking over *units*. A unit is one block of
rows with one split (a run of column tiles) of the vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = [
    "DEFAULT_WORKSPACE_BYTES",
    "GROUP",
    "MAX_SPLITS",
    "Chunks",
    "Split",
    "Tiles",
    "ceil_div",
    "kept_columns",
    "makespan",
    "plan_chunks",
    "plan_split",
    "token_chunks",
    "walk",
]

# Row blocks that run side by side and share a weight tile in L2; 8, 16 and 32 measured equal, 4 slower.
GROUP = 8
MAX_SPLITS = 96
# A unit's start and end cost about a tenth of a tile (filling the pipeline, writing the statistics).
_UNIT_COST = 0.1
# Chunk buffer plus fp32 hidden gradient. 512 MiB of buffer measured 1-6% faster a step than 128.
DEFAULT_WORKSPACE_BYTES = 600 << 20
# Keeping less than this part of the vocabulary gained nothing and cost up to 5%.
_SMALLEST_KEPT_PART = 0.2
# Chunk starts and row strides stay multiples of this, so that TMA and cuBLAS see aligned rows.
_COLUMN_STEP = 256
# Token chunks of the folded loss: one row block of the main kernels.
TOKEN_STEP = 128
# Where the budget allows, this many row blocks a step: cuBLAS takes 3.55 ms for the hidden gradient of 1664 tokens at
# 4096 x 151936 and 2.71 ms for that of 1536 (docs/adr).
_WIDE_STEPS = 4


@dataclass(frozen=True)
class Tiles:
    """Tile of a main kernel: ``rows`` x ``columns`` accumulators, ``depth`` of the hidden size a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Chunks:
    """The vocabulary ranges of a backward.

    Attributes:
        ranges: ``(first, end)`` of each chunk, in order.
        columns: the widest chunk, rounded up for the buffer's row stride.
        accumulate: the hidden gradient needs an fp32 accumulator (more than one chunk, or kept columns before).
    """

    ranges: tuple[tuple[int, int], ...]
    columns: int
    accumulate: bool


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


@dataclass(frozen=True)
class Split:
    """How the column tiles of every row block are cut: ``count`` runs of about equal length, then ``tail`` tiles.

    The runs go round the programs first; the tails go to the programs that got one run less (all, if none did), so
    that those are not idle while the others finish.
    """

    count: int
    tail: int

    @property
    def pieces(self) -> int:
        """Pieces a row block is cut into."""
        return self.count + (self.tail > 0)


@functools.lru_cache(maxsize=4096)
def plan_split(row_blocks: int, column_tiles: int, programs: int) -> Split:
    """The cut with which the persistent grid finishes first. Well under a millisecond for a size not seen before."""
    best, chosen = float("inf"), Split(1, 0)
    for count in range(1, min(column_tiles, MAX_SPLITS) + 1):
        rest = column_tiles % count
        # with a tail only runs of equal length are worth a look
        for tail in (0, rest, rest + count, rest + 2 * count):
            if tail > column_tiles - count:
                continue
            cost = makespan(row_blocks, column_tiles, Split(count, tail), programs)
            if cost < best - 1e-9:
                best, chosen = cost, Split(count, tail)
    return chosen


def makespan(row_blocks: int, column_tiles: int, split: Split, programs: int) -> float:
    """Tiles of the busiest program, with the cost of its units; an upper bound where the runs differ in length."""
    runs = row_blocks * split.count
    programs = min(programs, row_blocks * split.pieces)
    length = ceil_div(column_tiles - split.tail, split.count) + _UNIT_COST
    fewer, more = runs // programs, ceil_div(runs, programs)
    if not split.tail:
        return more * length
    tails = ceil_div(row_blocks, programs - runs % programs)
    return max(more * length, fewer * length + tails * (split.tail + _UNIT_COST))


def walk(row_blocks: int, column_tiles: int, split: Split, programs: int) -> list[list[tuple[int, int, int, int]]]:
    """What each program does, as (row block, piece, first tile, end tile): the kernels' own arithmetic, on the host."""
    runs = row_blocks * split.count
    width = GROUP * split.count
    body = column_tiles - split.tail
    work: list[list[tuple[int, int, int, int]]] = [
        [] for _ in range(min(programs, runs + row_blocks * (split.tail > 0)))
    ]
    for unit in range(runs):
        first_block = unit // width * GROUP
        size = min(row_blocks - first_block, GROUP)
        piece = unit % width // size
        block = first_block + unit % width % size
        bounds = piece * body // split.count, (piece + 1) * body // split.count
        work[unit % len(work)].append((block, piece, *bounds))
    if split.tail:
        first_spare = runs % len(work)
        spare = len(work) - first_spare
        for block in range(row_blocks):
            work[first_spare + block % spare].append((block, split.count, body, column_tiles))
    return work


def kept_columns(tokens: int, rows: int, itemsize: int, budget_bytes: int) -> int:
    """Vocabulary columns whose exponentials the forward keeps, given a byte budget.

    All of them if they fit, else a multiple of 256, or none if that would be under a fifth of the vocabulary. The
    budget pays for the exponentials and for one fp32 reference a row and 256 columns.
    """
    if tokens == 0 or budget_bytes <= 0:
        return 0
    tile_bytes = tokens * (_COLUMN_STEP * itemsize + 4)
    tiles = budget_bytes // tile_bytes
    if tiles * _COLUMN_STEP >= rows:
        return rows
    columns = tiles * _COLUMN_STEP
    return columns if columns >= _SMALLEST_KEPT_PART * rows else 0


def plan_chunks(
    tokens: int, first: int, rows: int, hidden_size: int, itemsize: int, workspace_bytes: int, *, reusable: int
) -> Chunks:
    """Cut columns ``[first, rows)`` into the fewest chunks that fit the workspace, all about equally wide.

    ``reusable`` columns of kept storage serve as buffer for free; chunks are at least that wide. A single chunk over
    everything needs no fp32 accumulator of the hidden gradient. Otherwise half of that accumulator comes off the
    budget: its other half lies where the hidden gradient itself will, which is made when the buffer is gone.
    """
    left = rows - first
    if left <= 0:
        return Chunks((), 0, accumulate=False)
    column_bytes = max(1, tokens) * itemsize
    if first == 0 and left * column_bytes <= workspace_bytes:
        return Chunks(((0, rows),), _step_up(left), accumulate=False)
    extra = tokens * hidden_size * 2 if itemsize < 4 else 0
    affordable = max(workspace_bytes - extra, workspace_bytes // 4) // column_bytes
    widest = max(_COLUMN_STEP, reusable // _COLUMN_STEP * _COLUMN_STEP, affordable // _COLUMN_STEP * _COLUMN_STEP)
    columns = _step_up(ceil_div(left, ceil_div(left, widest)))
    ranges = tuple((a, min(a + columns, rows)) for a in range(first, rows, columns))
    return Chunks(ranges, columns, accumulate=first > 0 or len(ranges) > 1)


def token_chunks(tokens: int, rows: int, itemsize: int, logits_bytes: int) -> list[tuple[int, int]]:
    """Token ranges whose exponentials fit ``logits_bytes``, few, about equal, in steps of 512 tokens or else 128.

    At least one range (an empty one for no tokens). A budget for less than 128 tokens counts as one for 128, and one
    for less than 1024 takes the small step.
    """
    token_bytes = max(1, rows * itemsize + ceil_div(rows, _COLUMN_STEP) * 4)
    affordable = logits_bytes // token_bytes
    step = TOKEN_STEP if affordable < 2 * _WIDE_STEPS * TOKEN_STEP else _WIDE_STEPS * TOKEN_STEP
    most = max(1, affordable // step)
    steps = max(1, ceil_div(tokens, step))
    count = ceil_div(steps, most)
    starts = [step * (part * steps // count) for part in range(count)]
    return [(first, min(end, tokens)) for first, end in zip(starts, [*starts[1:], tokens], strict=True)]


def _step_up(columns: int) -> int:
    return ceil_div(columns, _COLUMN_STEP) * _COLUMN_STEP
