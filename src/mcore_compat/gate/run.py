"""The gate from two sources to a report: read both, run both in each lane, run the witnesses, pair, decide."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import Finding, FindingState, expected_modes
from mcore_compat.contract.source.candidate import Candidate
from mcore_compat.files.untrusted import read_bounded
from mcore_compat.gate.blame import OURS, upstream_failures
from mcore_compat.gate.built import BuiltLane, build_all
from mcore_compat.gate.compare import contract_change, excused, pair_cells, vanished
from mcore_compat.gate.decide import decide, next_step_of
from mcore_compat.gate.model import GateFinding, GateReport, Lines, Side, SourceCheck, Tier, WitnessState
from mcore_compat.gate.sides import Sides, static_findings
from mcore_compat.gate.witness import Outcome, judge_usage_witness, judge_witness, run_witnesses, witness_of
from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.lanes import Lane
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.run_folder import RunFolder, new_run_id
from mcore_compat.pipeline.session import RunOptions, Session, prepare
from mcore_compat.project import Project
from mcore_compat.results import CellResult, Report
from mcore_compat.run.suite import LOG_LIMIT
from mcore_compat.verdicts import Verdict

__all__ = ["GateRun", "GateStep", "Judged", "run_gate"]

type MakeDisplay = Callable[[int], AbstractContextManager[Display]]
type RunSession = Callable[[Session, Display], Report]
type Named = tuple[Literal["contract", "usage"], int]
type Outcomes = dict[Named, tuple[Outcome, Outcome]]


@dataclass(frozen=True)
class GateStep:
    """Both sides in one lane.

    Attributes:
        name: of the tier.
        project: with the suite of this step.
        cells: the baseline's and the candidate's.
        options: how they are run.
        open_lane: makes the lane when the step begins; None: the step is not run.
        note: why it is not run, or what is special about it.
    """

    name: Literal["cpu", "gpu"]
    project: Project
    cells: tuple[Cell, Cell]
    options: RunOptions
    open_lane: Callable[[], Lane] | None
    note: str = ""


@dataclass(frozen=True)
class GateRun:
    """One run of the two cells."""

    report: Report
    folder: RunFolder

    @property
    def cells(self) -> dict[str, CellResult]:
        """Results by the cell's id."""
        return {result.id: result for result in self.report.cells}


@dataclass(frozen=True)
class Judged:
    """What the gate found.

    Attributes:
        gate: its report.
        run: the first run of the first step that ran, or None.
    """

    gate: GateReport
    run: GateRun | None


def run_gate(
    sides: Sides,
    steps: Sequence[GateStep],
    display: MakeDisplay,
    host: Mapping[str, str],
    *,
    rerun: bool = True,
    source: SourceCheck | None = None,
    run_session: RunSession = execute,
) -> Judged:
    """Judge the candidate against the baseline.

    Args:
        sides: both megatron-cores, read.
        steps: the lanes to run both in, cheapest first; none: the sources are read and nothing is run.
        display: makes the display for a number of cells.
        host: the caller's environment variables.
        rerun: run both again where they differ, to find checks that are not stable.
        source: what reading the project's own source gave; None: it was not read.
        run_session: runs the cells; a test gives another.

    Raises:
        UsageError: a data file is wrong.
        InfrastructureError: a tool, an interpreter or the build of the project's wheel fails.
    """
    begun = time.monotonic()
    static = static_findings(sides)
    tiers = [source.tier] if source is not None else []
    tiers.append(Tier(name="static", ran=True, seconds=_since(begun), note="nothing was run"))
    witnesses = _witnesses(static, source)
    pairs: tuple[GateFinding, ...] = ()
    results: dict[str, CellResult] = {}
    outcomes: Outcomes = {}
    first: GateRun | None = None
    for step in steps:
        if step.open_lane is None:
            tiers.append(Tier(name=step.name, ran=False, note=step.note))
            continue
        begun = time.monotonic()
        ran, paired, lane = _run_and_pair(step, step.open_lane(), display, host, run_session, rerun=rerun)
        tiers.append(Tier(name=step.name, ran=True, seconds=_since(begun), note=step.note))
        pairs += paired
        if first is not None:
            continue
        first = ran
        before, after = step.cells
        old, new = ran.cells[before.id], ran.cells[after.id]
        # The candidate's cell knows no exceptions of its own; those of the baseline hold for it too.
        results = {"old": old, "new": excused(new, old)}
        begun = time.monotonic()
        outcomes = _outcomes(witnesses, step.cells, results, lane, host)
        note = f"{len(outcomes)} reproducer{'' if len(outcomes) == 1 else 's'} on both sides"
        tiers.append(Tier(name="witness", ran=bool(outcomes), seconds=_since(begun), note=note))
        if Verdict.INFRA in {result.verdict for result in results.values()}:
            break
    run_id = first.report.run_id if first is not None else new_run_id()
    read = (
        *(_as_gate_finding(finding, outcomes.get(("contract", n))) for n, finding in enumerate(static)),
        *_usage_findings(source, outcomes),
    )
    gate = build_report(sides, (*read, *pairs), tiers, results, run_id, first.report if first else None)
    return Judged(gate, first)


def _run_and_pair(
    step: GateStep, lane: Lane, display: MakeDisplay, host: Mapping[str, str], run_session: RunSession, *, rerun: bool
) -> tuple[GateRun, tuple[GateFinding, ...], BuiltLane]:
    """Build and run both cells, and run once more if they differ; what is new, fixed, the same or not stable."""
    before, after = (cell.id for cell in step.cells)

    cells = tuple(dict.fromkeys(step.cells))
    with display(len(cells)) as shown:
        lane = build_all(lane, cells, host, shown.phase)

    def once() -> GateRun:
        session = prepare(step.project, cells, replace(step.options, kind="gate"), lane, host)
        with display(len(session.cells)) as shown:
            report = run_session(session, shown)
        session.folder.save_report(report)
        return GateRun(report, session.folder)

    first = once()
    own = OURS if lane.package is None else lane.package.modules
    blamed = _upstream_failures(first.folder.cell(after) / "reportlog.jsonl", own)
    paired = pair_cells(first.cells[before], first.cells[after], upstream=blamed)
    if rerun and any(f.state in {"new", "fixed"} for f in paired):
        again = once().cells
        paired = pair_cells(first.cells[before], first.cells[after], (again[before], again[after]), blamed)
    if not step.project.declares_checks:
        paired += vanished(first.cells[before], first.cells[after])
    return first, paired, lane


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 1)


def build_report(
    sides: Sides,
    findings: tuple[GateFinding, ...],
    tiers: Sequence[Tier],
    results: Mapping[str, CellResult],
    run_id: str,
    report: Report | None,
) -> GateReport:
    """The gate's report from everything that is known."""
    old = _side(sides, sides.baseline, sides.old, sides.old.name, results.get("old"))
    new = _side(sides, sides.candidate, sides.new, sides.nearest, results.get("new"))
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


def _witnesses(static: tuple[Finding, ...], source: SourceCheck | None) -> dict[Named, Lines]:
    """The witnesses of what is not on both sides, by the finding that each belongs to."""
    found: dict[Named, Lines] = {
        ("contract", number): lines
        for number, finding in enumerate(static)
        if finding.state is not FindingState.SAME and (lines := witness_of(finding)) is not None
    }
    if source is not None:
        found |= {("usage", number): lines for number, lines in source.witnesses.items()}
    return found


def _usage_findings(source: SourceCheck | None, outcomes: Outcomes) -> Iterator[GateFinding]:
    """Findings about the project's own source, with what their witnesses showed."""
    if source is None:
        return
    for number, finding in enumerate(source.findings):
        outcome = outcomes.get(("usage", number))
        if outcome is not None:
            note = next((o.note for o in reversed(outcome) if o.note), "")
            yield finding.model_copy(update={"witness": judge_usage_witness(*outcome), "witness_note": note})
        elif number in source.witnesses:
            yield finding.model_copy(update={"witness": "not run"})
        else:
            yield finding


def _outcomes(
    witnesses: Mapping[Named, Lines],
    cells: tuple[Cell, Cell],
    results: Mapping[str, CellResult],
    lane: Lane,
    host: Mapping[str, str],
) -> Outcomes:
    if any(result.verdict in {Verdict.INFRA, Verdict.UNRESOLVABLE} for result in results.values()):
        return {}
    if not witnesses:
        return {}
    runs = [_reproduced([*witnesses.values()], cell, lane, host) for cell in lane.adapted(cells)]
    return {named: (runs[0][place], runs[1][place]) for place, named in enumerate(witnesses)}


def _reproduced(lines: Sequence[Lines], cell: Cell, lane: Lane, host: Mapping[str, str]) -> list[Outcome]:
    """Run reproducers in a cell's environment, held, and verified to be the one that was judged."""
    cancel = threading.Event()
    with lane.hold(cell, cancel, lambda _: None):
        environment = lane.provision(cell).environment
        if environment is None:
            return [Outcome("error", "the environment is no longer there") for _ in lines]
        return run_witnesses(lines, cell, environment.folder, host, cancel)


def _upstream_failures(log: Path, own: Sequence[str]) -> frozenset[str]:
    try:
        return upstream_failures(read_bounded(log, LOG_LIMIT).split("\n"), own)
    except OSError:
        return frozenset()


def _side(sides: Sides, candidate: Candidate, contract: Contract, nearest: str, cell: CellResult | None) -> Side:
    return Side(
        name=candidate.label,
        kind=candidate.kind.value,
        distribution=contract.labels.distribution,
        attribute=contract.labels.attribute,
        commit=contract.labels.commit,
        nearest=nearest,
        modes=expected_modes(contract),
        note=sides.withdrawn.get(candidate.version or "", ""),
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
        change=() if finding.state is FindingState.SAME else contract_change(finding.old, finding.new),
    )
