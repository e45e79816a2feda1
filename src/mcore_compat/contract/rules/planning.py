"""Contract classes for planning: reads the committed contracts and rules, and names each cell's class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from mcore_compat.contract.rules.classes import class_names
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.matrix.cells import Cell

__all__ = ["class_of_cells"]


def class_of_cells(data: Path) -> Callable[[Cell], str]:
    """Class of a cell, computed when first asked for.

    A cell without a committed contract (a backport, another source) keeps the class that the matrix gives it, and so
    do all cells of a matrix that has no rules beside it.

    Args:
        data: ``compat_matrix``.
    """

    @functools.cache
    def names() -> dict[str, str]:
        if not (data / "rules").is_dir():
            return {}
        return class_names(load_snapshots(data / "contracts"), load_rules(data / "rules"))

    def class_of(cell: Cell) -> str:
        return cell.contract_class if cell.source is not None else names().get(cell.megatron_core, cell.contract_class)

    return class_of
