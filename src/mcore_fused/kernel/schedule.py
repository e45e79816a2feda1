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
    "Tiles",
    "ceil_div",
    "kept_columns",
    "plan_chunks",
    "split_count",
    "token_chunks",
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


@functools.lru_cache(maxsize=4096)
def split_count(row_blocks: int, column_tiles: int, programs: int) -> int:
    """Vocabulary splits with which the persistent grid finishes first.

    Plays the schedule for each count until one is within 0.5% of the ideal. The number of units is bounded, so a
    size not seen before costs milliseconds of host time once.
    """
    ideal = row_blocks * column_tiles / programs
    best, best_count = float("inf"), 1
    limit = max(1, min(column_tiles, MAX_SPLITS, 20 * programs // max(1, row_blocks)))
    for count in range(1, limit + 1):
        makespan = _makespan(row_blocks, column_tiles, count, programs)
        if makespan < best - 1e-9:
            best, best_count = makespan, count
        if best <= 1.005 * ideal + _UNIT_COST:
            break
    return best_count


def _makespan(row_blocks: int, column_tiles: int, splits: int, programs: int) -> float:
    units = row_blocks * splits
    load = [0.0] * min(programs, units)
    width = GROUP * splits
    for unit in range(units):
        group_size = min(row_blocks - unit // width * GROUP, GROUP)
        split = unit % width // group_size
        load[unit % programs] += (split + 1) * column_tiles // splits - split * column_tiles // splits + _UNIT_COST
    return max(load)


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
    everything needs no fp32 accumulator of the hidden gradient, whose bytes otherwise come off the budget first.
    """
    left = rows - first
    if left <= 0:
        return Chunks((), 0, accumulate=False)
    column_bytes = max(1, tokens) * itemsize
    if first == 0 and left * column_bytes <= workspace_bytes:
        return Chunks(((0, rows),), _step_up(left), accumulate=False)
    accumulator = tokens * hidden_size * 4 if itemsize < 4 else 0
    affordable = max(workspace_bytes - accumulator, workspace_bytes // 4) // column_bytes
    widest = max(_COLUMN_STEP, reusable // _COLUMN_STEP * _COLUMN_STEP, affordable // _COLUMN_STEP * _COLUMN_STEP)
    columns = _step_up(ceil_div(left, ceil_div(left, widest)))
    ranges = tuple((a, min(a + columns, rows)) for a in range(first, rows, columns))
    return Chunks(ranges, columns, accumulate=first > 0 or len(ranges) > 1)


def token_chunks(tokens: int, rows: int, itemsize: int, logits_bytes: int) -> list[tuple[int, int]]:
    """Token ranges whose exponentials fit ``logits_bytes``, the fewest, about equal, in steps of 128 rows.

    At least one range (an empty one for no tokens); at least 128 tokens each, whatever the budget.
    """
    step = TOKEN_STEP
    token_bytes = max(1, rows * itemsize + ceil_div(rows, _COLUMN_STEP) * 4)
    most = max(step, logits_bytes // token_bytes // step * step)
    count = max(1, ceil_div(tokens, most))
    width = max(step, ceil_div(ceil_div(tokens, count), step) * step)
    return [(first, min(first + width, tokens)) for first in range(0, max(1, tokens), width)]


def _step_up(columns: int) -> int:
    return ceil_div(columns, _COLUMN_STEP) * _COLUMN_STEP
