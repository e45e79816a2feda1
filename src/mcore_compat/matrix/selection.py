"""Which cells of the matrix a run judges: all, those named, one of each contract class, one shard of many."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_compat import versions
from mcore_compat.errors import SelectionError
from mcore_compat.matrix.cells import Cell, Matrix

__all__ = ["Selection", "Shard", "github_matrix", "github_shards", "plan_cells"]

_SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1) of ``count`` parts of a plan that take about equally long."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard that ``i/n`` names.

        Raises:
            SelectionError: it names none.
        """
        match = _SHARD.fullmatch(text)
        shard = cls(int(match.group(1)), int(match.group(2))) if match else None
        if shard is None or not 1 <= shard.index <= shard.count:
            raise SelectionError(f"`{text}` is not a shard.", "Write it as i/n with 1 <= i <= n, for example 2/4.")
        return shard

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, cells: Sequence[Cell], seconds: Mapping[str, float] | None = None) -> tuple[Cell, ...]:
        """This shard's cells, in the order of the plan; a function of its arguments alone.

        The longest cells are dealt first, each to the shard with the least work so far. Without durations all cells
        count equally, and neighbours go to different shards.

        Args:
            cells: the whole plan.
            seconds: measured duration by cell id; a cell without one counts as the median of the others.
        """
        known = [value for cell in cells if (value := (seconds or {}).get(cell.id)) is not None]
        usual = statistics.median(known) if known else 1.0
        weights = [(seconds or {}).get(cell.id, usual) for cell in cells]
        loads = [(0.0, 0, shard) for shard in range(self.count)]
        mine = []
        for place in sorted(range(len(cells)), key=lambda place: (-weights[place], place)):
            load, dealt, shard = min(loads)
            loads[shard] = (load + weights[place], dealt + 1, shard)
            if shard == self.index - 1:
                mine.append(place)
        return tuple(cells[place] for place in sorted(mine))


@dataclass(frozen=True)
class Selection:
    """What the caller asked for.

    Attributes:
        patterns: shell patterns over cell ids; empty means all.
        classes: one cell (the newest) of each contract class, and every backport.
        python: cells of this interpreter only, for a place that has one interpreter; None means all.
        shard: of what the others leave.
    """

    patterns: tuple[str, ...] = ()
    classes: bool = False
    python: str | None = None
    shard: Shard | None = None

    @property
    def whole(self) -> Selection:
        """The same selection without its shard."""
        return replace(self, shard=None)


def plan_cells(matrix: Matrix, selection: Selection, seconds: Mapping[str, float] | None = None) -> tuple[Cell, ...]:
    """The selected cells, in the order of the matrix.

    Args:
        matrix: with computed contract classes where the selection asks for one cell of each.
        selection: what the caller asked for.
        seconds: measured duration by cell id, by which shards are balanced.

    Raises:
        SelectionError: a pattern matches no cell, or nothing is left.
    """
    cells = matrix.cells
    if selection.patterns:
        cells = _matching(cells, selection.patterns)
    if selection.python is not None:
        cells = _of_interpreter(cells, selection.python)
    if selection.classes:
        cells = _representatives(cells)
    if selection.shard is not None:
        whole = len(cells)
        cells = selection.shard.of(cells, seconds)
        if not cells:
            raise SelectionError(
                f"Shard {selection.shard} of {whole} cells is empty.",
                f"Use at most {whole} shards.",
            )
    return cells


def github_matrix(cells: Iterable[Cell]) -> str:
    """The ``matrix`` of a GitHub workflow: one job a cell, as JSON on one line."""
    include = [
        {"cell": cell.id, "megatron_core": cell.megatron_core, "python": cell.python, "lane": cell.lane}
        for cell in cells
    ]
    return _on_one_line(include)


def github_shards(cells: Sequence[Cell], count: int, seconds: Mapping[str, float] | None = None) -> str:
    """The ``matrix`` of a GitHub workflow: one job a shard, as JSON on one line; there are no empty shards.

    Args:
        cells: the whole plan.
        count: shards, at most one a cell.
        seconds: measured duration by cell id.
    """
    shards = [Shard(index, min(count, len(cells))) for index in range(1, min(count, len(cells)) + 1)]
    include = []
    for shard in shards:
        mine = shard.of(cells, seconds)
        pythons = sorted({cell.python for cell in mine}, key=versions.sort_key)
        ids = [cell.id for cell in mine]
        include.append({"shard": str(shard), "index": shard.index, "cells": ids, "python": "\n".join(pythons)})
    return _on_one_line(include)


def _on_one_line(include: Sequence[Mapping[str, object]]) -> str:
    return json.dumps({"include": include}, separators=(",", ":"))


def _matching(cells: tuple[Cell, ...], patterns: tuple[str, ...]) -> tuple[Cell, ...]:
    ids = [cell.id for cell in cells]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(ids, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern, ids, n=3, cutoff=0.4) or ids[-3:]
            raise SelectionError(
                f"No cell of the matrix matches `{pattern}`.",
                f"Near it: {', '.join(near)}; `mcore-compat plan` lists all; see docs/add-a-version.md.",
            )
        chosen.update(matched)
    return tuple(cell for cell in cells if cell.id in chosen)


def _of_interpreter(cells: tuple[Cell, ...], python: str) -> tuple[Cell, ...]:
    found = tuple(cell for cell in cells if cell.python == python)
    if not found:
        others = ", ".join(sorted({cell.python for cell in cells}))
        raise SelectionError(
            f"None of the selected cells is for Python {python}; they are for {others}.",
            "Select other cells; `mcore-compat plan --github` names the interpreter of each.",
        )
    return found


def _representatives(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    assert all(cell.contract_class for cell in cells), "the matrix was loaded without its contract classes"
    newest: dict[str, Cell] = {}
    for cell in cells:
        if "backport" in cell.tags:
            continue
        rival = newest.get(cell.contract_class)
        if rival is None or versions.sort_key(cell.megatron_core) > versions.sort_key(rival.megatron_core):
            newest[cell.contract_class] = cell
    kept = {cell.id for cell in newest.values()}
    return tuple(cell for cell in cells if cell.id in kept or "backport" in cell.tags)
