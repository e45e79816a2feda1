"""The packing layout: built once from the row lengths, then used for every tensor of the batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_fused.errors import CallArgumentError, PackingError
from mcore_fused.outputs import check_temperature
from mcore_fused.packing.containers import Container, jagged_container, lengths_container, padded_container
from mcore_fused.packing.exchange import gather_shards
from mcore_fused.packing.settings import ContextParallelLayout, PackingSettings
from mcore_fused.packing.slots import RowTable, SlotTable, build_slots, gather_slots

__all__ = ["IGNORE_INDEX", "PackingLayout"]

#: Label that Megatron, PyTorch and the fused kernel leave out.
IGNORE_INDEX = -100

_MOST_SLOTS = 2**31 - 2  # boundaries and indices are int32, and one past the end must still fit


@dataclass(frozen=True, eq=False)
class PackingLayout:
    """One packed (THD) micro-batch as one context-parallel rank holds it; immutable.

    Real and padded boundaries are separate: the padded ones decide which slots exist, the real ones which slots
    count. Build it with :meth:`from_lengths`, :meth:`from_nested`, :meth:`from_mask` or
    :meth:`from_boundaries`. Row lengths reach the host once there; nothing after that synchronises with the
    device, except value checks of a temperature tensor and the comparison of a foreign jagged tensor's offsets.

    Attributes:
        settings: parallel setup and alignment.
        lengths: real tokens of each row.
        padded_lengths: slots of each row; one entry more than ``lengths`` when a filler row carries what the
            whole batch needs (FP8 alignment, bucket, smallest shard, a batch without any token).
        cu_seqlens: ``[len(padded_lengths) + 1]`` int32, real boundaries.
        cu_seqlens_padded: the same shape, padded boundaries in the global buffer.
        container: where the caller's tokens are.
        slots: index tensors of this rank's slots.
    """

    settings: PackingSettings
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    container: Container
    slots: SlotTable

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | torch.Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        cp_layout: ContextParallelLayout = "zigzag",
        fp8_recipe: str | None = None,
        min_local_rows: int = 1,
        pad_to_length_bucket: int = 1,
        device: torch.device | str | None = None,
    ) -> PackingLayout:
        """Lay out rows of the given lengths; sources are flat values ``[tokens, ...]`` or jagged tensors.

        Args:
            lengths: real tokens of each row, at least one row; rows of 0 tokens are allowed.
            cp_size: see :class:`PackingSettings`, as for all that follow.
            cp_rank: this rank.
            tp_size: tensor-parallel size.
            sequence_parallel: whether local rows are scattered over the tensor-parallel ranks.
            cp_layout: ``zigzag`` or ``contiguous``.
            fp8_recipe: None, ``delayed``, ``tensorwise``, ``mxfp8`` or ``blockwise``.
            min_local_rows: fewest slots of a rank.
            pad_to_length_bucket: multiple of the global padded length.
            device: device of the index tensors; by default that of ``lengths``, else the CPU.

        Raises:
            PackingError: no rows, a negative length, or impossible settings.
        """
        if isinstance(lengths, torch.Tensor):
            device = lengths.device if device is None else device
            lengths = lengths.tolist()
        rows = tuple(int(length) for length in lengths)
        settings = PackingSettings(
            cp_size, cp_rank, tp_size, sequence_parallel, cp_layout, fp8_recipe, min_local_rows, pad_to_length_bucket
        )
        _check_rows(rows)
        return cls.build(settings, rows, lengths_container(rows, torch.device(device or "cpu")))

    @classmethod
    def from_nested(cls, nested: torch.Tensor, settings: PackingSettings | None = None) -> PackingLayout:
        """Lay out a jagged nested tensor ``[rows, ragged, ...]``; results come back with its own offsets."""
        container, lengths = jagged_container(nested)
        return cls.build(settings or PackingSettings(), lengths, container)

    @classmethod
    def from_mask(cls, mask: torch.Tensor, settings: PackingSettings | None = None) -> PackingLayout:
        """Lay out a padded batch; ``mask`` ``[rows, width]`` is True at real tokens, left, right or in between."""
        container, lengths = padded_container(mask)
        return cls.build(settings or PackingSettings(), lengths, container)

    @classmethod
    def from_boundaries(cls, cu_seqlens: torch.Tensor, settings: PackingSettings | None = None) -> PackingLayout:
        """Lay out rows known by cumulative lengths.

        Args:
            cu_seqlens: ``[n + 1]``, or ``[micro_batch, n + 1]`` with the boundaries of every sample; trailing
                repeated entries (sentinels of constant-size arrays) are rows of no token.
            settings: parallel setup and alignment.

        Raises:
            PackingError: the boundaries do not start at 0 or fall.
        """
        if cu_seqlens.dim() not in (1, 2) or cu_seqlens.shape[-1] < 2:
            raise PackingError(
                f"cu_seqlens has the shape {list(cu_seqlens.shape)}.", "pass [n + 1] or [micro_batch, n + 1]."
            )
        table = cu_seqlens.reshape(-1, cu_seqlens.shape[-1]).tolist()
        if any(bounds[0] != 0 for bounds in table):
            raise PackingError("cu_seqlens does not start at 0.", "pass cumulative lengths, sample by sample.")
        rows = tuple(end - start for bounds in table for start, end in itertools.pairwise(bounds))
        return cls.build(settings or PackingSettings(), rows, lengths_container(rows, cu_seqlens.device))

    @classmethod
    def build(cls, settings: PackingSettings, lengths: tuple[int, ...], container: Container) -> PackingLayout:
        """Make the index tensors: one small table goes to the device, everything else is computed there."""
        _check_rows(lengths)
        padded_lengths = settings.padded_lengths(lengths)
        if sum(padded_lengths) > _MOST_SLOTS:
            raise PackingError(
                f"the batch has {sum(padded_lengths)} slots; boundaries are int32.", "use smaller micro-batches."
            )
        table = RowTable.of(lengths, padded_lengths, container.offsets.device)
        return cls(
            settings=settings,
            lengths=lengths,
            padded_lengths=padded_lengths,
            cu_seqlens=table.boundaries(table.ends),
            cu_seqlens_padded=table.boundaries(table.padded_ends),
            container=container,
            slots=build_slots(table, settings, container.positions),
        )

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.cu_seqlens.device

    @property
    def tokens(self) -> int:
        """Real tokens of the whole batch."""
        return self.container.tokens

    @property
    def total_tokens(self) -> int:
        """Slots of the whole batch, over all context-parallel ranks."""
        return sum(self.padded_lengths)

    @property
    def local_tokens(self) -> int:
        """Slots of this context-parallel rank."""
        return self.total_tokens // self.settings.cp_size

    @property
    def max_seqlen(self) -> int:
        """Slots of the longest row."""
        return max(self.padded_lengths)

    @property
    def position_ids(self) -> torch.Tensor:
        """``[1, local_tokens]`` int64: position of each slot inside its row; 0 in padding."""
        return self.slots.position.masked_fill_(self.slots.gap, 0).to(torch.int64).unsqueeze(0)

    @property
    def padding_mask(self) -> torch.Tensor:
        """``[1, local_tokens]`` bool: True at slots without a real token (Megatron's ``padding_mask``)."""
        return self.slots.gap.clone().unsqueeze(0)

    def for_rank(self, cp_rank: int) -> PackingLayout:
        """The layout of another rank of the same batch."""
        settings = dataclasses.replace(self.settings, cp_rank=cp_rank)
        return type(self).build(settings, self.lengths, self.container)

    def to(self, device: torch.device | str) -> PackingLayout:
        """The same layout with its index tensors on another device."""
        return type(self).build(self.settings, self.lengths, self.container.to(torch.device(device)))

    def pack(self, source: torch.Tensor, pad_value: float = 0, *, what: str = "source") -> torch.Tensor:
        """Pack any per-token tensor.

        Args:
            source: in the batch's container, with any trailing dimensions.
            pad_value: what padding slots hold.
            what: name of the tensor for error messages.

        Returns:
            ``[1, local_tokens, ...]``, same dtype, differentiable.

        Raises:
            PackingError: the tensor is not of this batch.
        """
        return gather_slots(self.container.flatten(source, what), self.slots.source, self.slots.gap, pad_value)

    def pack_ids(self, ids: torch.Tensor, pad_token_id: int = 0) -> torch.Tensor:
        """Pack token ids ``[1, local_tokens]``; padding holds ``pad_token_id``, a real row of the embedding."""
        return self.pack(ids, pad_token_id, what="ids")

    def pack_labels(
        self,
        labels: torch.Tensor,
        *,
        shift: bool = True,
        mask: torch.Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> torch.Tensor:
        """Pack labels ``[1, local_tokens]``; what has no label holds ``ignore_index``.

        Args:
            labels: token ids in the batch's container.
            shift: each slot gets the next token of its own row, the last of a row nothing; False when the
                caller has already shifted.
            mask: in the same container, False at labels that do not count (it moves with its label).
            ignore_index: label of padding, of the last slot of a row and of masked labels.
        """
        flat = self.container.flatten(labels, "labels")
        if mask is not None:
            kept = mask if mask.dtype == torch.bool else mask != 0
            flat = torch.where(self.container.flatten(kept, "labels mask"), flat, ignore_index)
        slots = self.slots
        index, gap = (slots.next_source, slots.next_gap) if shift else (slots.source, slots.gap)
        return gather_slots(flat, index, gap, ignore_index)

    def pack_temperature(self, temperature: float | torch.Tensor) -> float | torch.Tensor:
        """Pack a temperature as the labels are packed; slot i scales the logits of slot i, so nothing shifts.

        Args:
            temperature: a number; a floating tensor ``[]``; ``[rows]``, one for each row; or one for each
                token in the batch's container.

        Returns:
            The number itself, or ``[1, local_tokens]``, at least fp32, with 1 in padding, which must not divide by 0.

        Raises:
            CallArgumentError: a value at a real token is not finite or not above 0.
            CallTypeError: not a number and not a floating tensor.
            PackingError: the tensor is not of this batch.
        """
        check_temperature(temperature)
        if not isinstance(temperature, torch.Tensor):
            return float(temperature)
        dtype = torch.promote_types(temperature.dtype, torch.float32)
        if not temperature.is_nested and temperature.dim() <= 1:
            flat = self._per_row(temperature.to(self.device, dtype))
            index, real = self.slots.row, flat
        else:
            flat = self.container.flatten(temperature, "temperature").to(dtype)
            index, real = self.slots.source, self.container.real(flat)
        if flat.dim() != 1:
            raise PackingError("temperature has trailing dimensions.", "pass one value for each token.")
        # Checked over the whole batch, not this rank's slots: all ranks refuse together, none waits for the rest.
        if not bool((torch.isfinite(real) & (real > 0)).all()):
            raise CallArgumentError(
                "temperature holds a value that is not finite or not above 0 at a real token.",
                "pass finite values above 0; for greedy rollouts compute training log-probs at temperature 1.",
            )
        return gather_slots(flat, index, self.slots.gap, 1.0)

    def unpack(self, output: torch.Tensor, cp_group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
        """Bring one value per slot back into the batch's container.

        Args:
            output: ``[1, local_tokens, ...]`` or ``[local_tokens]``.
            cp_group: the context-parallel group, needed when there is more than one rank. Every rank gets
                the whole batch; gradients flow into this rank's own slots only (see ``gather_shards``).

        Returns:
            A jagged tensor with the caller's offsets, or ``[rows, width, ...]`` with 0 outside real tokens.

        Raises:
            PackingError: the output has another number of slots, or the group does not fit the layout.
        """
        if self.settings.cp_size == 1:
            return self.unpack_ranks([output])
        if cp_group is None or cp_group.size() != self.settings.cp_size:
            size = "none" if cp_group is None else f"one of {cp_group.size()}"
            raise PackingError(
                f"the layout is split over {self.settings.cp_size} ranks, the group is {size}.",
                "pass the context-parallel group the layout was made for.",
            )
        return self._restore(gather_shards(self._slots_of(output), cp_group, self.settings.cp_rank))

    def unpack_ranks(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Like :meth:`unpack`, from the outputs of all ranks in order; needs no process group."""
        if len(outputs) != self.settings.cp_size:
            raise PackingError(
                f"{len(outputs)} outputs for {self.settings.cp_size} ranks.", "pass one output of every rank, in order."
            )
        return self._restore([self._slots_of(output) for output in outputs])

    def _restore(self, shards: list[torch.Tensor]) -> torch.Tensor:
        stream = shards[0] if len(shards) == 1 else torch.cat(shards)
        return self.container.restore(stream.index_select(0, self.slots.unpack))

    def _slots_of(self, output: torch.Tensor) -> torch.Tensor:
        expected = (self.local_tokens,) if output.dim() == 1 else (1, self.local_tokens)
        if output.is_nested or tuple(output.shape[: len(expected)]) != expected:
            shape = "nested" if output.is_nested else list(output.shape)
            raise PackingError(
                f"the packed output is {shape}, this rank holds {self.local_tokens} slots.",
                "unpack with the layout the batch was packed with; gather sequence-parallel slices first.",
            )
        return output if output.dim() == 1 else output[0]

    def _per_row(self, temperature: torch.Tensor) -> torch.Tensor:
        rows, padded_rows = len(self.lengths), len(self.padded_lengths)
        if temperature.dim() == 0:
            return temperature.expand(padded_rows)
        if temperature.shape[0] != rows:
            raise PackingError(
                f"temperature has the shape {list(temperature.shape)} for {rows} rows.",
                "pass one value for each row, or one for each token in the batch's container.",
            )
        return torch.nn.functional.pad(temperature, (0, padded_rows - rows), value=1.0)


def _check_rows(lengths: tuple[int, ...]) -> None:
    if not lengths:
        raise PackingError("the batch has no rows.", "skip an empty micro-batch, or pass rows of length 0.")
    if min(lengths) < 0:
        raise PackingError(f"a row has the length {min(lengths)}.", "pass lengths of 0 or more, boundaries that rise.")
