"""Index arithmetic of a packed batch: which token is in which slot of which rank. Pure tensor functions.

A packed buffer is a sequence of runs: stretches of slots whose tokens follow one another in their row. Per-run
numbers are small tables; one repeat spreads them over the slots, so the work per slot is a few additions for every
layout, and no size is read from the device. All indices are int32, like the boundaries, because the arithmetic is
bound by memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_fused.packing.settings import PackingSettings

__all__ = ["RowTable", "SlotTable", "build_slots", "gather_slots"]


@dataclass(frozen=True, eq=False)
class RowTable:
    """Per-row numbers on the device, each ``[padded rows]`` int32; moved there in one copy.

    Attributes:
        lengths: real tokens; 0 for a filler row.
        padded_lengths: slots.
        ends: end of each row in the stream of real tokens.
        padded_ends: end of each row in the global padded buffer.
        tokens: real tokens, on the host.
        total_tokens: slots, on the host.
    """

    lengths: torch.Tensor
    padded_lengths: torch.Tensor
    ends: torch.Tensor
    padded_ends: torch.Tensor
    tokens: int
    total_tokens: int

    @classmethod
    def of(cls, lengths: tuple[int, ...], padded_lengths: tuple[int, ...], device: torch.device) -> RowTable:
        """Build the table; ``padded_lengths`` may have one entry more than ``lengths``."""
        filler = (0,) * (len(padded_lengths) - len(lengths))
        sizes = torch.tensor([(*lengths, *filler), padded_lengths], dtype=torch.int32)
        columns = torch.cat([sizes, sizes.cumsum(dim=1, dtype=torch.int32)]).to(device)
        return cls(columns[0], columns[1], columns[2], columns[3], sum(lengths), sum(padded_lengths))

    @property
    def starts(self) -> torch.Tensor:
        """Start of each row in the stream of real tokens."""
        return self.ends - self.lengths

    @property
    def padded_starts(self) -> torch.Tensor:
        """Start of each row in the global padded buffer."""
        return self.padded_ends - self.padded_lengths

    @staticmethod
    def boundaries(ends: torch.Tensor) -> torch.Tensor:
        """Ends as cumulative lengths from 0, int32 as attention kernels want them."""
        return torch.nn.functional.pad(ends, (1, 0))


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Index tensors (int32) of one rank's slots, ``[local_tokens]``, and of the way back, ``[tokens]``.

    Attributes:
        run: run of each slot.
        run_row: row of each run, counting a filler row.
        run_offset: what to add to a slot of each run to get its position inside its padded row.
        source: element of the flattened source; any element if there is none.
        gap: True at slots without a real token.
        next_source: element of the next token of the same row; any element if there is none.
        next_gap: True if the slot's token has no next one in its row, or the slot has no token.
        unpack: for each real token, its slot in the concatenation of all ranks' shards.
    """

    run: torch.Tensor
    run_row: torch.Tensor
    run_offset: torch.Tensor
    source: torch.Tensor
    gap: torch.Tensor
    next_source: torch.Tensor
    next_gap: torch.Tensor
    unpack: torch.Tensor

    @property
    def row(self) -> torch.Tensor:
        """Row of each slot, counting a filler row."""
        return self.run_row.index_select(0, self.run)

    @property
    def position(self) -> torch.Tensor:
        """Position of each slot inside its padded row."""
        return _spread(self.run_offset, self.run)


def build_slots(table: RowTable, settings: PackingSettings, positions: torch.Tensor | None) -> SlotTable:
    """Build all index tensors without reading a number from the device.

    Args:
        table: per-row numbers.
        settings: parallel setup; decides which slots are this rank's.
        positions: indices of the real tokens in a dense source; None if they are contiguous.
    """
    local_tokens = table.total_tokens // settings.cp_size
    row, begin, count = _local_runs(table, settings)
    run_offset = begin - _starts(count)
    run = torch.repeat_interleave(count, output_size=local_tokens)
    stream = _spread(run_offset + table.starts.index_select(0, row), run)
    following = stream + 1
    end = table.ends.index_select(0, row).index_select(0, run)
    gap, next_gap = stream >= end, following >= end
    return SlotTable(
        run=run,
        run_row=row,
        run_offset=run_offset,
        source=_element(stream, table.tokens, positions),
        gap=gap,
        next_source=_element(following, table.tokens, positions),
        next_gap=next_gap,
        unpack=_unpack_index(table, settings),
    )


def gather_slots(flat: torch.Tensor, index: torch.Tensor, gap: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Take one element for each slot, ``[1, slots, ...]``; gaps hold ``pad_value``."""
    if flat.shape[0] == 0:  # nothing to point at; appending keeps the graph, so a backward over this batch works
        flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
    taken = flat.index_select(0, index)
    return taken.masked_fill_(gap.reshape(-1, *(1,) * (taken.dim() - 1)), pad_value).unsqueeze(0)


def _local_runs(table: RowTable, settings: PackingSettings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs of this rank in order: row, position of the first slot inside its row, number of slots."""
    cp_size, cp_rank = settings.cp_size, settings.cp_rank
    row = torch.arange(table.lengths.shape[0], dtype=torch.int32, device=table.lengths.device)
    if cp_size == 1:
        return row, torch.zeros_like(row), table.padded_lengths
    if settings.cp_layout == "contiguous":
        slab = table.total_tokens // cp_size
        begin = table.padded_starts.clamp(slab * cp_rank, slab * (cp_rank + 1))
        end = table.padded_ends.clamp(slab * cp_rank, slab * (cp_rank + 1))
        return row, begin - table.padded_starts, end - begin
    half = table.padded_lengths // (2 * cp_size)
    begin = torch.stack([half * cp_rank, half * (2 * cp_size - 1 - cp_rank)], dim=1)
    return row.repeat_interleave(2, output_size=2 * row.shape[0]), begin.reshape(-1), half.repeat_interleave(2)


def _unpack_index(table: RowTable, settings: PackingSettings) -> torch.Tensor:
    """Return, per real token of the batch, its slot in the concatenated shards of all ranks."""
    cp_size = settings.cp_size
    if cp_size == 1 or settings.cp_layout == "contiguous":
        first, count = table.padded_starts, table.lengths
    else:
        half = (table.padded_lengths // (2 * cp_size)).unsqueeze(1)
        chunk = torch.arange(2 * cp_size, dtype=torch.int32, device=half.device)
        owner = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
        local_start = (table.padded_starts // cp_size).unsqueeze(1)
        first = owner * (table.total_tokens // cp_size) + local_start + (chunk >= cp_size) * half
        count = (table.lengths.unsqueeze(1) - chunk * half).clamp(min=0).minimum(half)
        first, count = first.reshape(-1), count.reshape(-1)
    run = torch.repeat_interleave(count, output_size=table.tokens)
    return _spread(first - _starts(count), run)


def _starts(count: torch.Tensor) -> torch.Tensor:
    """Return where each run starts if runs follow one another."""
    return count.cumsum(dim=0, dtype=torch.int32) - count


def _spread(offset: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    """Return each slot's own number plus the offset of its run."""
    slots = torch.arange(run.shape[0], dtype=torch.int32, device=run.device)
    return slots.add_(offset.index_select(0, run))


def _element(stream: torch.Tensor, tokens: int, positions: torch.Tensor | None) -> torch.Tensor:
    """Stream index to source element; gaps may point beyond the stream and are brought back into it."""
    index = stream.clamp(max=max(tokens - 1, 0))
    return index if positions is None or tokens == 0 else positions.index_select(0, index)
