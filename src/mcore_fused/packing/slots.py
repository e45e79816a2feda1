"""Index arithmetic of a packed batch: which token lies in which slot of which rank. Pure tensor functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_fused.packing.settings import PackingSettings

__all__ = ["RowTable", "SlotTable", "build_slots", "gather_slots", "unpack_index"]


@dataclass(frozen=True, eq=False)
class RowTable:
    """Per-row numbers on the device, each ``[padded rows]`` int64; moved there in one copy.

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
        sizes = torch.tensor([(*lengths, *filler), padded_lengths], dtype=torch.int64)
        columns = torch.cat([sizes, sizes.cumsum(dim=1)]).to(device)
        return cls(columns[0], columns[1], columns[2], columns[3], sum(lengths), sum(padded_lengths))

    @property
    def padded_starts(self) -> torch.Tensor:
        """Start of each row in the global padded buffer."""
        return self.padded_ends - self.padded_lengths

    @staticmethod
    def boundaries(ends: torch.Tensor) -> torch.Tensor:
        """Ends as cumulative lengths from 0, int32 as attention kernels want them."""
        return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Index tensors of one rank's slots, ``[local_tokens]``, and of the way back, ``[tokens]``.

    Attributes:
        row: row of each slot, counting a filler row.
        position: position inside its padded row.
        valid: whether a real token lies there.
        source: element of the flattened source; 0 where not valid.
        next_valid: whether the slot's token has a next one in its row.
        next_source: that next token's element; 0 where there is none.
        unpack: for each real token, its slot in the concatenation of all ranks' shards.
    """

    row: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor
    source: torch.Tensor
    next_valid: torch.Tensor
    next_source: torch.Tensor
    unpack: torch.Tensor


def build_slots(table: RowTable, settings: PackingSettings, positions: torch.Tensor | None) -> SlotTable:
    """Make all index tensors without asking the device for a number.

    Args:
        table: per-row numbers.
        settings: parallel setup; decides which slots are this rank's.
        positions: where real tokens lie in a dense source, None when they lie one after the other.
    """
    row, position = _local_slots(table, settings)
    length = table.lengths[row]
    stream = (table.ends - table.lengths)[row] + position
    valid = position < length
    next_valid = position + 1 < length
    return SlotTable(
        row=row,
        position=position,
        valid=valid,
        source=_element(stream, valid, positions),
        next_valid=next_valid,
        next_source=_element(stream + 1, next_valid, positions),
        unpack=unpack_index(table, settings),
    )


def unpack_index(table: RowTable, settings: PackingSettings) -> torch.Tensor:
    """For each real token of the batch, its slot in the shards of all ranks laid one after the other."""
    token = torch.arange(table.tokens, device=table.ends.device)
    row = torch.searchsorted(table.ends, token, right=True)
    position = token - (table.ends - table.lengths)[row]
    slot = table.padded_starts[row] + position
    if settings.cp_size == 1 or settings.cp_layout == "contiguous":
        return slot
    half = (table.padded_lengths // (2 * settings.cp_size))[row]
    chunk = position // half
    mirrored = chunk >= settings.cp_size
    rank = torch.where(mirrored, 2 * settings.cp_size - 1 - chunk, chunk)
    local_start = (table.padded_starts // settings.cp_size)[row]
    local_slot = local_start + position - chunk * half + mirrored * half
    return rank * (table.total_tokens // settings.cp_size) + local_slot


def gather_slots(flat: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Take one element for each slot, ``[1, slots, ...]``; slots that are not valid hold ``pad_value``."""
    if flat.shape[0] == 0:  # nothing to point at; appending keeps the graph, so a backward over this batch works
        flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
    taken = flat.index_select(0, index)
    gap = valid.logical_not().reshape(-1, *(1,) * (taken.dim() - 1))
    return taken.masked_fill(gap, pad_value).unsqueeze(0)


def _local_slots(table: RowTable, settings: PackingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position inside the row of each slot of this rank."""
    cp_size, cp_rank = settings.cp_size, settings.cp_rank
    local_tokens = table.total_tokens // cp_size
    slot = torch.arange(local_tokens, device=table.ends.device)
    if cp_size == 1 or settings.cp_layout == "contiguous":
        slot = slot + cp_rank * local_tokens
        row = torch.searchsorted(table.padded_ends, slot, right=True)
        return row, slot - table.padded_starts[row]
    row = torch.searchsorted(table.padded_ends // cp_size, slot, right=True)
    offset = slot - (table.padded_starts // cp_size)[row]
    half = (table.padded_lengths // (2 * cp_size))[row]
    mirrored = offset >= half
    chunk = torch.where(mirrored, 2 * cp_size - 1 - cp_rank, cp_rank)
    return row, chunk * half + offset - mirrored * half


def _element(stream: torch.Tensor, valid: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Stream index to source element; slots that are not valid point at the first element and are masked later."""
    index = torch.where(valid, stream, 0)
    return index if positions is None or positions.shape[0] == 0 else positions[index]
