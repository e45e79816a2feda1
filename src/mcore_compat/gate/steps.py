"""The gate's steps that do not depend on how environments are made: compare two runs, run witnesses, conclude."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import Finding, FindingState, expected_modes
from mcore_compat.contract.source.candidate import Candidate
from mcore_compat.gate.blame import upstream_failures
from mcore_compat.gate.compare import pair_cells
from mcore_compat.gate.decide import decide, next_step_of
from mcore_compat.gate.model import GateFinding, GateReport, Side, Tier, WitnessState
from mcore_compat.gate.sides import Sides
from mcore_compat.gate.witness import Outcome, judge_witness, run_witnesses, witness_of
from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.results import CellResult, Report
from mcore_compat.verdicts import Verdict

__all__ = ["Ran", "compared", "concluded", "witnesses_of"]


@dataclass(frozen=True)
class Ran:
    """One run of the two cells."""

    report: Report
    folder: RunFolder

    @property
    def cells(self) -> dict[str, CellResult]:
        """Results by the cell's id."""
        return {result.id: result for result in self.report.cells}


def compared(once: Callable[[], Ran], cells: tuple[Cell, Cell], *, rerun: bool) -> tuple[Ran, tuple[GateFinding, ...]]:
    """Run both cells, and once more where they differ; what is new, fixed, the same or flaky."""
    before, after = (cell.id for cell in cells)
    first = once()
    blamed = _upstream_failures(first.folder.cell(after) / "reportlog.jsonl")
    paired = pair_cells(first.cells[before], first.cells[after], upstream=blamed)
    if rerun and any(f.state in {"new", "fixed"} for f in paired):
        again = once().cells
        paired = pair_cells(first.cells[before], first.cells[after], (again[before], again[after]), blamed)
    return first, paired


def concluded(
    sides: Sides,
    static: tuple[Finding, ...],
    outcomes: Mapping[int, tuple[Outcome, Outcome]],
    pairs: tuple[GateFinding, ...],
    tiers: Sequence[Tier],
    results: Mapping[str, CellResult],
    run_id: str,
    report: Report | None,
) -> GateReport:
    """The gate's report from everything that is known."""
    findings = (*(_as_gate_finding(f, outcomes.get(n)) for n, f in enumerate(static)), *pairs)
    old = _side(sides.baseline, sides.old, sides.old.name, results.get("old"))
    new = _side(sides.candidate, sides.new, sides.nearest, results.get("new"))
    verdict, reason = decide(old, new, tiers, findings)
    return GateReport(
        run_id=run_id,
        verdict=verdict,
        reason=reason,
        next_step=next_step_of(verdict, new, findings),
        baseline=old,
        candidate=new,
        tiers=tuple(tiers),
        findings=findings,
        subject=report.subject.model_dump() if report is not None else {},
    )


def witnesses_of(
    static: tuple[Finding, ...],
    cells: tuple[Cell, Cell],
    results: Mapping[str, CellResult],
    folder: Path,
    host: Mapping[str, str],
) -> tuple[dict[int, tuple[Outcome, Outcome]], Tier]:
    """Outcomes by number of the finding, for those that have a witness and are not on both sides; and the step.

    Args:
        static: the contracts' findings.
        cells: both cells.
        results: their verdicts; without an environment no witness can run.
        folder: holds the cells' environments.
        host: the caller's environment.
    """
    begun = time.monotonic()
    outcomes = _outcomes(static, cells, results, folder, host)
    note, seconds = f"{len(outcomes)} witnesses on both sides", round(time.monotonic() - begun, 1)
    return outcomes, Tier(name="witness", ran=bool(outcomes), seconds=seconds, note=note)


def _outcomes(
    static: tuple[Finding, ...],
    cells: tuple[Cell, Cell],
    results: Mapping[str, CellResult],
    folder: Path,
    host: Mapping[str, str],
) -> dict[int, tuple[Outcome, Outcome]]:
    if any(result.verdict in {Verdict.INFRA, Verdict.UNRESOLVABLE} for result in results.values()):
        return {}
    sources = {
        number: lines
        for number, finding in enumerate(static)
        if finding.state is not FindingState.SAME and (lines := witness_of(finding)) is not None
    }
    if not sources:
        return {}
    cancel = threading.Event()
    runs = [run_witnesses([*sources.values()], cell, folder / cell.id, host, cancel) for cell in cells]
    return {number: (runs[0][place], runs[1][place]) for place, number in enumerate(sources)}


def _upstream_failures(log: Path) -> frozenset[str]:
    if not log.is_file():
        return frozenset()
    with log.open(encoding="utf-8", errors="replace") as lines:
        return upstream_failures(lines)


def _side(candidate: Candidate, contract: Contract, nearest: str, cell: CellResult | None) -> Side:
    return Side(
        name=candidate.label,
        kind=candidate.kind.value,
        distribution=contract.labels.distribution,
        attribute=contract.labels.attribute,
        commit=contract.labels.commit,
        nearest=nearest,
        modes=expected_modes(contract),
        cell=cell,
    )


def _as_gate_finding(finding: Finding, outcomes: tuple[Outcome, Outcome] | None) -> GateFinding:
    witness: WitnessState = "none"
    note = ""
    if outcomes is not None:
        witness = judge_witness(finding.state, *outcomes)
        note = next((o.note for o in reversed(outcomes) if o.note), "")
    elif finding.rule.witness is not None:
        witness = "not run"
    return GateFinding(
        origin="contract",
        title=finding.rule.id,
        state=finding.state.value,
        level=finding.level,
        message=finding.text,
        where=finding.where or None,
        item=finding.item,
        link=finding.rule.link,
        witness=witness,
        witness_note=note,
        consequence=dict(finding.rule.consequence),
    )
