"""All use lists against all Megatrons: the matrix that the page shows, and its refresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_compat.usage.check import Side
from mcore_compat.usage.extract import extract_uses
from mcore_compat.usage.matrix import UsageReport, assess
from mcore_compat.usage.sources import open_source
from mcore_compat.usage.use_lists import Downstream, UseList, UseListError, save_use_list

__all__ = ["assess_all", "pinned_label", "refresh"]


def refresh(folder: Path, downstream: Downstream, source: str) -> UseList:
    """Read a downstream's source again and write its list.

    Args:
        folder: of the lists.
        downstream: its entry in ``sources.toml``.
        source: a clone as ``git+file:///clone@ref``, a folder, or a published package.
    """
    opened = open_source(source, include=downstream.include)
    extracted = replace(extract_uses(opened), name=downstream.name)
    if not extracted.uses:
        raise UseListError(
            f"{downstream.name} uses nothing of Megatron in {', '.join(downstream.include)}.", "check its include."
        )
    found = UseList(extracted, downstream.pin)
    save_use_list(folder, found)
    return found


def pinned_label(uses: UseList, sides: Sequence[Side]) -> str | None:
    """The label of the Megatron that a downstream is written for, if it is among the sides."""
    return next((side.label for side in sides if uses.pin in {side.label, side.resolver.tree.commit}), None)


def assess_all(
    lists: Sequence[UseList], sides: Sequence[Side], progress: Callable[[str], None] = lambda _: None
) -> tuple[UsageReport, ...]:
    """One report for each downstream."""
    reports = []
    for uses in lists:
        progress(uses.name)
        reports.append(assess(uses.extracted, sides, pin=pinned_label(uses, sides)))
    return tuple(reports)
