"""Operands in the form that the kernels read: rows contiguous, with a TMA descriptor where alignment allows one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel.devices import DeviceTraits, device_traits, tiles_for
from mcore_fused.kernel.problem import Problem
from mcore_fused.kernel.schedule import Tiles
from mcore_fused.kernel.triton_forward import LOG2E

__all__ = ["Operands", "descriptor", "prepare", "tma_readable"]

_TMA_ALIGNMENT = 16


@dataclass(frozen=True)
class Operands:
    """A problem with what the launchers derive from it.

    Attributes:
        hidden: ``[N, H]``, rows contiguous.
        weight: ``[V, H]``, rows contiguous.
        row_scale: ``[N]`` fp32, scale / temperature * log2 e, or None where one number serves all rows.
        scale: that number (1.0 where ``row_scale`` is given).
        real_rows: rows of the weight that take part.
        ignore_index: the label of rows that do not count.
        vocab_offset: the first row's id among the labels.
        distributed: gradients of hidden are partial sums.
        tma: both operands can be read through TMA descriptors.
        tiles: the plain kernels' tile.
        traits: the device.
    """

    hidden: Tensor
    weight: Tensor
    row_scale: Tensor | None
    scale: float
    real_rows: int
    ignore_index: int
    vocab_offset: int
    distributed: bool
    tma: bool
    tiles: Tiles
    traits: DeviceTraits

    @property
    def tokens(self) -> int:
        """N."""
        return self.hidden.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the operands are."""
        return self.hidden.device


def prepare(problem: Problem) -> Operands:
    """Operands of a problem. A layout whose rows are not contiguous costs one copy.

    Raises:
        CallArgumentError: the device has no Triton path.
    """
    traits = device_traits(problem.hidden.device)
    if traits is None:
        raise CallArgumentError(f"no Triton path on {problem.hidden.device}", "use backend='auto' or 'torch'.")
    hidden, weight = _rows_contiguous(problem.hidden.detach()), _rows_contiguous(problem.weight.detach())
    scale = problem.logit_scale * LOG2E
    return Operands(
        hidden=hidden,
        weight=weight,
        row_scale=scale if isinstance(scale, Tensor) else None,
        scale=1.0 if isinstance(scale, Tensor) else scale,
        real_rows=problem.real_rows,
        ignore_index=problem.ignore_index,
        vocab_offset=problem.vocab_offset,
        distributed=problem.group is not None,
        tma=traits.tma and tma_readable(hidden) and tma_readable(weight),
        tiles=tiles_for(hidden.dtype, traits),
        traits=traits,
    )


def _rows_contiguous(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    unit = matrix.stride(1) == 1 or columns == 1
    apart = rows <= 1 or matrix.stride(0) >= columns
    return matrix if unit and apart else matrix.contiguous()


def tma_readable(matrix: Tensor) -> bool:
    """Base and row stride are multiples of 16 bytes, columns adjacent."""
    size = matrix.element_size()
    return (
        matrix.data_ptr() % _TMA_ALIGNMENT == 0
        and matrix.stride(1) == 1
        and matrix.stride(0) * size % _TMA_ALIGNMENT == 0
    )


def descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """A host-side TMA descriptor with blocks of ``rows`` x ``columns``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
