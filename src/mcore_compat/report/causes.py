"""Groups the findings of all cells by cause: what failed, where, since which release, and what to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_compat import versions
from mcore_compat.results import CellResult, Finding, Report
from mcore_compat.verdicts import Verdict

__all__ = ["Cause", "causes"]


@dataclass(frozen=True)
class Cause:
    """One cause of one or more red cells.

    Attributes:
        finding: as the first of the cells has it.
        verdict: what it alone makes of its cells; None: a note, told and not held against them.
        cells: ids, in the order of the run.
        since: since which release it is seen, in words.
    """

    finding: Finding
    verdict: Verdict | None
    cells: tuple[str, ...]
    since: str

    @property
    def title(self) -> str:
        """The check, or the first line where no check is concerned."""
        return self.finding.check or self.headline

    @property
    def headline(self) -> str:
        """First line of the message."""
        return self.finding.headline

    @property
    def level(self) -> str:
        """The verdict's name, or ``note``."""
        return self.verdict.value if self.verdict is not None else "note"

    @property
    def told(self) -> str:
        """One line: which check, if any, and the first line."""
        return f"{self.finding.check}: {self.headline}" if self.finding.check else self.headline


def causes(report: Report) -> tuple[Cause, ...]:
    """The causes, those that touch most cells first; then what the run itself is blamed for; notes at the end."""
    groups: dict[tuple[str, ...], list[tuple[CellResult, Finding]]] = {}
    for cell in report.cells:
        seen = set()
        for finding in cell.findings:
            key = _signature(finding)
            if key not in seen:
                seen.add(key)
                groups.setdefault(key, []).append((cell, finding))
    found = [
        Cause(
            finding=members[0][1],
            verdict=members[0][1].verdict,
            cells=tuple(cell.id for cell, _ in members),
            since=_since(report, [cell for cell, _ in members]),
        )
        for members in groups.values()
    ]
    found.sort(key=lambda cause: -len(cause.cells))
    found += [Cause(finding, finding.verdict, (), "in the run itself") for finding in report.findings]
    found.sort(key=lambda cause: cause.verdict is None)
    return tuple(found)


def _signature(finding: Finding) -> tuple[str, ...]:
    """Equal for findings of one cause: figures and addresses in the message do not count."""
    # The checks that a cell misses follow from its own cause; a check's own failure is told by its first line.
    return (finding.kind, finding.check or "", finding.signature)


def _since(report: Report, touched: list[CellResult]) -> str:
    """In words: from which release on, or where else."""
    order = sorted({cell.megatron_core.requested for cell in report.cells if _is_release(cell)}, key=versions.sort_key)
    here = {cell.megatron_core.requested for cell in touched if _is_release(cell)}
    if not here or not order:
        return "in " + ", ".join(cell.id for cell in touched)
    if here == set(order):
        return f"in every release of this run ({len(order)})"
    first, last = min(order.index(label) for label in here), max(order.index(label) for label in here)
    if {*order[first : last + 1]} != here:
        return "in " + ", ".join(sorted(here, key=versions.sort_key))
    if len(here) == 1 and last < len(order) - 1:
        return f"in {order[first]} only"
    if last == len(order) - 1:
        return f"since {order[first]} ({order[first - 1]} is free of it)"
    until = f"up to {order[last]} ({order[last + 1]} is free of it)"
    return until if first == 0 else f"from {order[first]} {until}"


def _is_release(cell: CellResult) -> bool:
    return cell.id == cell.megatron_core.requested
