"""Causes of a verdict: what failed, where, since when, for whom, what to do. Every format is drawn from them. Pure.

A cause of a run is what cells have in common. A cause of a gate is a difference between its two sides: a finding in
upstream's source with the failing checks that name it, or failing checks with one message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_compat import versions
from mcore_compat.contract.rules.rule import MODES
from mcore_compat.gate.model import GateFinding, GateReport, State, WitnessState
from mcore_compat.results import FAILED_CHECK, CellResult, Finding, Report, signature
from mcore_compat.verdicts import LEVELS, Level

__all__ = ["HEADINGS", "STATES", "Cause", "all_causes", "causes", "gate_causes"]

STATES: tuple[State, ...] = ("new", "flaky", "fixed", "same")
HEADINGS: Mapping[State, str] = {
    "new": "New with the candidate",
    "flaky": "Not stable: another result in the second run",
    "fixed": "Gone with the candidate",
    "same": "On both sides",
}
_REPRODUCED: Mapping[WitnessState, str] = {
    "confirmed": "reproduced",
    "refuted": "not reproduced",
    "inconclusive": "the reproducer is inconclusive",
    "not run": "the reproducer was not run",
    "none": "",
}
_NAMED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Cause:
    """One thing that somebody has to know or to act on, and all that it explains.

    Attributes:
        kind: the finding's kind or rule.
        level: what it makes of a verdict, in one word; ``note`` counts for nothing.
        weight: the same as one of the levels that all findings share.
        message: what was found; its first line stands alone.
        checks: failing checks that it explains, in order.
        cells: ids of the cells, in the order of the run.
        since: in which releases, in words; "" for a gate.
        state: new, gone or shared between the sides of a gate.
        where: ``path:line`` in upstream's source.
        source: ``path:line`` in the project's own source.
        change: lines of a diff of what upstream changed.
        reproducer: whether the reproducer showed it on both sides, in words.
        consequences: what it means, by mode.
        remark: what else is known, such as another failure of the same check on the baseline.
        upstream: no code of the subject was on the stack.
        in_source: it was read in a source; otherwise it was seen when a cell ran.
        models: how many models have it at the same place.
    """

    kind: str
    level: str
    weight: Level
    message: str
    checks: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    since: str = ""
    state: State | None = None
    where: str = ""
    source: str = ""
    change: tuple[str, ...] = ()
    reproducer: str = ""
    consequences: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    upstream: bool = False
    in_source: bool = False
    models: int = 1
    next_step: str = ""
    link: str | None = None

    @property
    def by_mode(self) -> Iterator[tuple[str, str]]:
        """Consequences with the modes' full names."""
        return ((MODES.get(mode, mode), words) for mode, words in self.consequences.items())

    @property
    def headline(self) -> str:
        """First line of the message."""
        return self.message.strip().partition("\n")[0] or self.kind

    @property
    def scope(self) -> str:
        """The checks concerned, in a few words; "" for none."""
        if not self.checks:
            return ""
        more = len(self.checks) - 1
        return self.checks[0] + (f" and {more} more check{'s' if more > 1 else ''}" if more else "")

    @property
    def title(self) -> str:
        """The checks, or the first line if no check is concerned."""
        return self.scope or self.headline

    @property
    def told(self) -> str:
        """One line: which checks, if any, and the first line."""
        return f"{self.scope}: {self.headline}" if self.checks else self.headline


def causes(report: Report) -> tuple[Cause, ...]:
    """Causes of a run, those of most cells first; then what the run itself is blamed for; notes at the end."""
    groups: dict[tuple[str, ...], list[tuple[CellResult, Finding]]] = {}
    for cell in report.cells:
        for finding in cell.findings:
            # Notes are about one check each: two that read alike are still two things that were measured.
            about = (finding.check or "") if finding.verdict is None else ""
            groups.setdefault((finding.kind, finding.weight, about, finding.signature), []).append((cell, finding))
    found = [_of_run(report, members) for members in groups.values()]
    found.sort(key=lambda cause: (-len(cause.cells), -len(cause.checks)))
    found += [_cause(finding, (finding,), since="in the run itself") for finding in report.findings]
    found.sort(key=lambda cause: cause.level == "note")
    return tuple(found)


def _of_run(report: Report, members: Sequence[tuple[CellResult, Finding]]) -> Cause:
    cells = {cell.id: cell for cell, _ in members}
    first = members[0][1]
    cause = _cause(first, tuple(finding for _, finding in members), since=_since(report, [*cells.values()]))
    return replace(cause, cells=tuple(cells))


def _cause(first: Finding, members: Iterable[Finding], since: str) -> Cause:
    return Cause(
        kind=first.kind,
        level=first.verdict.value if first.verdict is not None else "note",
        weight=first.weight,
        message=first.text,
        checks=tuple(dict.fromkeys(finding.check for finding in members if finding.check)),
        since=since,
        next_step=first.next_step,
        link=first.link,
    )


def gate_causes(gate: GateReport) -> tuple[Cause, ...]:
    """Causes of a gate's answer, worst first within each state; failing checks are below the finding that they name."""
    groups: dict[tuple[object, ...], list[GateFinding]] = {}
    for finding in gate.findings:
        key = (
            ("cell", finding.state, finding.weight, finding.upstream, finding.signature)
            if finding.origin == "cell"
            else (
                finding.title,
                finding.state,
                finding.weight,
                finding.message,
                finding.where,
                finding.source,
                finding.witness,
            )
        )
        groups.setdefault(key, []).append(finding)
    read = [_of_gate(members) for members in groups.values() if members[0].origin != "cell"]
    seen = [_of_gate(members) for members in groups.values() if members[0].origin == "cell"]
    return tuple(sorted(_folded(read, seen), key=_gate_order))


def all_causes(report: Report | None, gate: GateReport | None) -> tuple[Cause, ...]:
    """Causes of a gate and, below them, what its cells have that the gate's own findings do not say; notes last."""
    of_run = causes(report) if report is not None else ()
    if gate is None:
        return of_run
    checks = {finding.title for finding in gate.findings}
    said = {finding.signature for finding in gate.findings}
    rest = (
        c
        for c in of_run
        if c.level == "note" or not (signature(c.message) in said or checks.issuperset(c.checks or ("",)))
    )
    found = [*gate_causes(gate), *rest]
    found.sort(key=lambda cause: cause.level == "note")
    return tuple(found)


def _of_gate(members: Sequence[GateFinding]) -> Cause:
    first = members[0]
    seen = first.origin == "cell"
    reproduced = _REPRODUCED[first.witness]
    note = f": {first.witness_note}" if reproduced and first.witness_note else ""
    checks = tuple(finding.title for finding in members if "::" in finding.title) if seen else ()
    return Cause(
        kind=FAILED_CHECK if checks else first.title,
        level="note" if first.weight == "info" else first.weight,
        weight=first.weight,
        message=first.text,
        checks=checks,
        state=first.state,
        where=first.where or "",
        source=first.source or "",
        change=first.change,
        reproducer=f"{reproduced}{note}",
        consequences=dict(first.consequence),
        remark=first.witness_note if seen else "",
        upstream=first.upstream,
        in_source=not seen,
        models=1 if seen else len(members),
        next_step=first.next_step,
        link=first.link,
    )


def _folded(read: Sequence[Cause], seen: Sequence[Cause]) -> list[Cause]:
    """Failing checks whose message names what exactly one new finding is about belong to that finding."""
    names = {
        number: set(_NAMED.findall(cause.headline))
        for number, cause in enumerate(read)
        if cause.state == "new" and cause.weight == "break"
    }
    kept: list[Cause] = []
    below: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(read)), ())
    for cause in seen:
        owners = [number for number, words in names.items() if any(_mentions(cause.message, word) for word in words)]
        if cause.state == "new" and cause.checks and not cause.upstream and len(owners) == 1:
            below[owners[0]] = (*below[owners[0]], *cause.checks)
        else:
            kept.append(cause)
    return [*(replace(cause, checks=tuple(sorted(below[number]))) for number, cause in enumerate(read)), *kept]


def _mentions(message: str, word: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", message) is not None


def _gate_order(cause: Cause) -> tuple[int, ...]:
    assert cause.state is not None
    unshown = not cause.reproducer.startswith("reproduced")
    return (STATES.index(cause.state), LEVELS.index(cause.weight), unshown, not cause.in_source, -len(cause.checks))


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
