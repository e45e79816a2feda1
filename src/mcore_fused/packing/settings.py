"""Settings that decide how a packed batch is padded and split: the parallel setup and the alignment rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mcore_fused.errors import PackingError

__all__ = ["FP8_ROW_MULTIPLES", "ContextParallelLayout", "PackingSettings"]

ContextParallelLayout = Literal["zigzag", "contiguous"]

#: Rows that the matrix product of one rank must be a multiple of, by Megatron's name of the recipe
#: (``TransformerConfig.fp8_recipe``). 16 is the alignment of an FP8 product, 32 the block of MXFP8, 128 the
#: tile of 2-D block scaling. A recipe that is not here has no known alignment and is refused.
FP8_ROW_MULTIPLES: Mapping[str, int] = MappingProxyType(
    {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
)


@dataclass(frozen=True)
class PackingSettings:
    """Parallel setup and alignment of one packed batch; two sides that differ here must not share a batch.

    Attributes:
        cp_size: ranks that share the sequence dimension.
        cp_rank: which of them this is.
        tp_size: tensor-parallel ranks; they split the local rows only under sequence parallelism.
        sequence_parallel: whether the model scatters the local rows over the tensor-parallel ranks.
        cp_layout: ``zigzag``: every row is cut into ``2 * cp_size`` chunks and rank r holds the chunks r and
            ``2 * cp_size - 1 - r`` (equal causal-attention work); ``contiguous``: the global padded buffer is
            cut into ``cp_size`` consecutive slabs, whatever rows they hold.
        fp8_recipe: None, or a key of :data:`FP8_ROW_MULTIPLES`.
        min_local_rows: fewest tokens that one context-parallel rank may hold.
        pad_to_length_bucket: the global padded length is a multiple of this.

    Raises:
        PackingError: a size that cannot be, a rank outside its group, an unknown layout or recipe.
    """

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_layout: ContextParallelLayout = "zigzag"
    fp8_recipe: str | None = None
    min_local_rows: int = 1
    pad_to_length_bucket: int = 1

    def __post_init__(self) -> None:
        for name in ("cp_size", "tp_size", "min_local_rows", "pad_to_length_bucket"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PackingError(f"{name} is {value!r}.", "pass an integer of at least 1.")
        if not 0 <= self.cp_rank < self.cp_size:
            raise PackingError(
                f"cp_rank is {self.cp_rank} in a group of {self.cp_size}.", "pass the rank inside the group."
            )
        if self.cp_layout not in ("zigzag", "contiguous"):
            raise PackingError(f"cp_layout is {self.cp_layout!r}.", "use 'zigzag' or 'contiguous'.")
        if self.fp8_recipe is not None and self.fp8_recipe not in FP8_ROW_MULTIPLES:
            raise PackingError(
                f"fp8_recipe {self.fp8_recipe!r} has no known row alignment.",
                f"use one of {sorted(FP8_ROW_MULTIPLES)}, or None without FP8.",
            )

    @property
    def row_multiple(self) -> int:
        """Multiple of every row's padded length: chunks and sequence-parallel slices come out whole."""
        chunks = 2 if self.cp_layout == "zigzag" and self.cp_size > 1 else 1
        return self.cp_size * chunks * self.sequence_shards

    @property
    def sequence_shards(self) -> int:
        """Slices of one context-parallel rank's rows: ``tp_size`` under sequence parallelism, else 1."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def total_multiple(self) -> int:
        """Multiple of the global padded length.

        FP8 alignment applies to what one rank multiplies, its own slice after both splits: a global length
        that is a multiple of the block does not imply it for the slices.
        """
        block = FP8_ROW_MULTIPLES[self.fp8_recipe] if self.fp8_recipe is not None else 1
        shards = self.cp_size * self.sequence_shards
        return math.lcm(self.row_multiple, shards * block, self.pad_to_length_bucket)

    def padded_lengths(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Length of every row with its padding, followed by a filler row when the whole needs more.

        Args:
            lengths: real tokens of every row.

        Returns:
            As many lengths as rows, or one more: what the total, the smallest shard or the bucket asks for
            goes into a row of its own. Extending the last real row instead would make its padding part of
            that row's attention, and of the longest row's cost.
        """
        multiple = self.row_multiple
        rows = tuple(_round_up(length, multiple) for length in lengths)
        total = sum(rows)
        wanted = _round_up(max(total, self.min_local_rows * self.cp_size), self.total_multiple)
        return rows if wanted == total else (*rows, wanted - total)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
