"""The containers of a batch, each as one flat stream of elements."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mcore_fused.errors import PackingError

__all__ = ["Container", "jagged_container", "lengths_container", "padded_container"]


@dataclass(frozen=True, eq=False)
class Container:
    """Where row tokens are in the caller's tensors, and how results are returned.

    Attributes:
        kind: ``jagged``: ``torch.jagged`` nested tensors, or their flat values ``[tokens, ...]``;
            ``padded``: dense ``[rows, width, ...]`` with a mask.
        rows: rows of the batch.
        tokens: real tokens of the batch.
        offsets: ``[rows + 1]``, start of each row in the stream of real tokens. The caller's own tensor if
            there is one: torch combines two jagged tensors only if they share their offsets.
        positions: ``[tokens]`` int64, index of each real token in the flattened dense tensor; None if the
            stream has no gaps.
        width: second dimension of a padded batch.
    """

    kind: Literal["jagged", "padded"]
    rows: int
    tokens: int
    offsets: torch.Tensor
    positions: torch.Tensor | None = None
    width: int = 0

    def flatten(self, source: torch.Tensor, what: str) -> torch.Tensor:
        """Return ``source`` as ``[elements, ...]``.

        Raises:
            PackingError: the tensor does not match the batch: container, rows, width, lengths or device.
        """
        if source.device != self.offsets.device:
            raise PackingError(
                f"{what} is on {source.device}, the layout on {self.offsets.device}.",
                "make the layout with device=, or move it with .to(device).",
            )
        if self.kind == "padded":
            if source.is_nested or source.dim() < 2 or tuple(source.shape[:2]) != (self.rows, self.width):
                shape = "nested" if source.is_nested else list(source.shape)
                raise PackingError(
                    f"{what} is {shape}, the layout was made from a mask [{self.rows}, {self.width}].",
                    "pass a dense tensor of the mask's shape, or make a layout from this tensor's own lengths.",
                )
            return source.reshape(self.rows * self.width, *source.shape[2:])
        values = self._jagged_values(source, what) if source.is_nested else source
        if values.dim() == 0 or values.shape[0] != self.tokens:
            raise PackingError(
                f"{what} has the shape {list(values.shape)}, the layout holds {self.tokens} tokens.",
                "pass a jagged tensor with the layout's rows, or its flat values [tokens, ...]; "
                "for padded batches make the layout with PackingLayout.from_mask.",
            )
        return values

    def _jagged_values(self, source: torch.Tensor, what: str) -> torch.Tensor:
        jagged = _without_holes(source, what)
        offsets = jagged.offsets()
        if offsets is not self.offsets and not torch.equal(offsets, self.offsets.to(offsets.dtype)):
            raise PackingError(
                f"{what} has other row lengths than the layout.", "make one layout for one batch and carry it along."
            )
        values: torch.Tensor = jagged.values()
        return values

    def real(self, flat: torch.Tensor) -> torch.Tensor:
        """The real tokens' elements of a flattened source, ``[tokens, ...]``."""
        return flat if self.positions is None else flat.index_select(0, self.positions)

    def restore(self, stream: torch.Tensor) -> torch.Tensor:
        """Put one value per real token, ``[tokens, ...]``, back into the caller's container; gaps are 0."""
        if self.kind == "jagged":
            return torch.nested.nested_tensor_from_jagged(stream, self.offsets)
        dense = stream.new_zeros(self.rows * self.width, *stream.shape[1:])
        if self.positions is not None:
            dense = dense.index_copy(0, self.positions, stream)
        return dense.reshape(self.rows, self.width, *stream.shape[1:])

    def to(self, device: torch.device) -> Container:
        """The same container on another device."""
        positions = None if self.positions is None else self.positions.to(device)
        return Container(self.kind, self.rows, self.tokens, self.offsets.to(device), positions, self.width)


def lengths_container(lengths: tuple[int, ...], device: torch.device) -> Container:
    """A jagged batch known only by its row lengths."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), dim=0, out=offsets[1:])
    return Container("jagged", len(lengths), sum(lengths), offsets.to(device))


def jagged_container(nested: torch.Tensor) -> tuple[Container, tuple[int, ...]]:
    """Read a jagged nested tensor's rows; one copy of the offsets to the host.

    Raises:
        PackingError: not a ``torch.jagged`` nested tensor whose second dimension is the ragged one.
    """
    jagged = _without_holes(nested, "the nested tensor")
    offsets = jagged.offsets()
    bounds = offsets.tolist()
    lengths = tuple(end - start for start, end in itertools.pairwise(bounds))
    if jagged.values().shape[0] != bounds[-1] or bounds[0] != 0:
        raise PackingError(
            "the nested tensor is ragged in another dimension than the second.", "pass [rows, ragged, ...]."
        )
    return Container("jagged", len(lengths), bounds[-1], offsets), lengths


def padded_container(mask: torch.Tensor) -> tuple[Container, tuple[int, ...]]:
    """Read a padded batch's mask, True at real tokens; costs two copies to the host.

    Raises:
        PackingError: the mask is not a dense ``[rows, width]`` tensor of 0 and 1.
    """
    if mask.is_nested or mask.dim() != 2:
        raise PackingError(
            "the mask is not a dense [rows, width] tensor.",
            "pass the 2-D attention mask; for nested batches use PackingLayout.from_nested.",
        )
    real = mask if mask.dtype == torch.bool else mask != 0
    lengths = tuple(real.sum(dim=1).tolist())
    positions = real.reshape(-1).nonzero().squeeze(1)
    offsets = lengths_container(lengths, mask.device).offsets
    return Container("padded", mask.shape[0], sum(lengths), offsets, positions, mask.shape[1]), lengths


def _without_holes(nested: torch.Tensor, what: str) -> Any:
    # Any: the jagged methods (offsets, lengths, values) are those of a Tensor subclass that torch keeps private.
    if not nested.is_nested or nested.layout != torch.jagged:
        raise PackingError(
            f"{what} is not a jagged nested tensor.",
            "build it with torch.nested.nested_tensor(..., layout=torch.jagged).",
        )
    jagged: Any = nested
    return jagged if jagged.lengths() is None else jagged.contiguous()
