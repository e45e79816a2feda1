"""The gate from a name to a report: read both sources, run both cells and the witnesses, pair, decide."""

from __future__ import annotations

import datetime as dt
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_compat.contract.candidate import Candidate, CandidateKind, open_candidate, parse_candidate
from mcore_compat.contract.compare import Finding, FindingState, compare_contracts, expected_modes
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules import Rule, load_rules
from mcore_compat.contract.snapshots import load_snapshots, snapshot_path
from mcore_compat.contract.surface import extract
from mcore_compat.errors import UsageError
from mcore_compat.gate.blame import upstream_failures
from mcore_compat.gate.cells import baseline_version, candidate_cell, cell_of_release, nearest_release
from mcore_compat.gate.decide import decide, next_step_of
from mcore_compat.gate.model import GateFinding, GateReport, Side, Tier, WitnessState
from mcore_compat.gate.pairing import pair_cells
from mcore_compat.gate.witness import Outcome, judge_witness, run_witnesses, witness_of
from mcore_compat.matrix import Cell, Matrix, load_matrix
from mcore_compat.plan import Selection
from mcore_compat.progress import Display
from mcore_compat.releases import load_releases
from mcore_compat.report import CellResult, Report
from mcore_compat.session import Prepared, RunConfig, execute, prepare
from mcore_compat.store import new_run_id
from mcore_compat.verdicts import Verdict

type MakeDisplay = Callable[[int], AbstractContextManager[Display]]

__all__ = ["GateConfig", "Sides", "read_sides", "run_gate", "static_findings"]


@dataclass(frozen=True)
class GateConfig:
    """What the caller asked for.

    Attributes:
        run: paths and options of the cells' runs; its selection is not used.
        static_only: read the sources, run nothing.
        rerun: run both cells again where they differ, to tell flaky checks.
    """

    run: RunConfig
    static_only: bool = False
    rerun: bool = True


@dataclass(frozen=True)
class Sides:
    """Both megatron-cores, read."""

    matrix: Matrix
    rules: tuple[Rule, ...]
    snapshots: Mapping[str, Contract]
    baseline: Candidate
    candidate: Candidate
    old: Contract
    new: Contract

    @property
    def nearest(self) -> str:
        """Release that the candidate's surface is nearest to."""
        return nearest_release(self.new, self.snapshots)


def read_sides(root: Path, candidate: str, baseline: str | None, reports: tuple[Report, ...]) -> Sides:
    """Read both sources; nothing of them is run.

    Raises:
        UsageError: one of them cannot be read, or is not megatron-core.
    """
    data = root / "compat_matrix"
    matrix, rules, snapshots = (
        load_matrix(data / "matrix.toml"),
        load_rules(data / "rules"),
        load_snapshots(data / "contracts"),
    )
    releases = load_releases(data / "releases.json")

    def contract_of(side: Candidate) -> Contract:
        if side.kind is CandidateKind.RELEASE and side.version is not None:
            path = snapshot_path(data / "contracts", side.version)
            if path.is_file():
                return snapshots[path.stem]
        return extract(open_candidate(side, releases), side.label)

    asked = parse_candidate(candidate)
    compared = parse_candidate(baseline or baseline_version(matrix, reports, asked.version))
    return Sides(matrix, rules, snapshots, compared, asked, contract_of(compared), contract_of(asked))


def static_findings(sides: Sides) -> tuple[Finding, ...]:
    """What the rules say of the two contracts."""
    return compare_contracts(sides.old, sides.new, sides.rules)


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
        message=finding.sentence,
        where=finding.where or None,
        item=finding.item,
        link=finding.rule.link,
        witness=witness,
        witness_note=note,
        consequence=dict(finding.rule.consequence),
    )


def run_gate(
    config: GateConfig, sides: Sides, display: MakeDisplay, host: Mapping[str, str], now: dt.datetime
) -> tuple[GateReport, Report | None]:
    """Judge the candidate against the baseline.

    Returns:
        The gate's report, and the report of the two cells, None where none was run.

    Raises:
        UsageError: a data file is wrong.
        InfrastructureError: uv, the interpreter or the subject's build fails.
    """
    started = time.monotonic()
    static = static_findings(sides)
    tiers = [Tier(name="static", ran=True, seconds=round(time.monotonic() - started, 1), note="nothing was run")]
    nearest = sides.nearest
    pairs: tuple[GateFinding, ...] = ()
    results: dict[str, CellResult] = {}
    outcomes: dict[int, tuple[Outcome, Outcome]] = {}
    report: Report | None = None
    run_id = new_run_id(now)
    if config.static_only:
        tiers.append(Tier(name="cpu", ran=False, note="not asked for"))
    else:
        for lane in ("cpu", "gpu"):
            if lane == "gpu" and not _has_gpu():
                tiers.append(Tier(name="gpu", ran=False, note="this host has no GPU"))
                continue
            before, after = _cells(sides, nearest, lane)
            begun = time.monotonic()
            prepared = _prepared(config, sides, (before, after), host, now)
            first = _executed(prepared, display)
            judged = {result.id: result for result in first.cells}
            blamed = _upstream_failures(prepared, after)
            paired = pair_cells(judged[before.id], judged[after.id], upstream=blamed)
            if config.rerun and any(f.state in {"new", "fixed"} for f in paired):
                again = _prepared(config, sides, (before, after), host, now)
                second = {result.id: result for result in _executed(again, display).cells}
                repeated = second[before.id], second[after.id]
                paired = pair_cells(judged[before.id], judged[after.id], repeated, blamed)
            tiers.append(Tier(name=lane, ran=True, seconds=round(time.monotonic() - begun, 1)))
            pairs += paired
            if lane == "cpu":
                results = {"old": judged[before.id], "new": judged[after.id]}
                report, run_id = first, first.run_id
                begun = time.monotonic()
                outcomes = _witnesses(config, static, (before, after), results, host)
                note = f"{len(outcomes)} witnesses on both sides"
                tiers.append(
                    Tier(name="witness", ran=bool(outcomes), seconds=round(time.monotonic() - begun, 1), note=note)
                )
                if Verdict.INFRA in {r.verdict for r in results.values()}:
                    break
    findings = (*(_as_gate_finding(f, outcomes.get(n)) for n, f in enumerate(static)), *pairs)
    old = _side(sides.baseline, sides.old, sides.old.name, results.get("old"))
    new = _side(sides.candidate, sides.new, nearest, results.get("new"))
    verdict, reason = decide(old, new, tiers, findings)
    gate = GateReport(
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
    return gate, report


def _executed(run: Prepared, make: MakeDisplay) -> Report:
    with make(len(run.cells)) as display:
        return execute(run, display)


def _upstream_failures(run: Prepared, cell: Cell) -> frozenset[str]:
    log = run.folder.cell(cell.id) / "reportlog.jsonl"
    if not log.is_file():
        return frozenset()
    with log.open(encoding="utf-8", errors="replace") as lines:
        return upstream_failures(lines)


def _cells(sides: Sides, nearest: str, lane: str) -> tuple[Cell, Cell]:
    before = candidate_cell(sides.baseline, sides.old, sides.matrix, nearest_release(sides.old, sides.snapshots))
    if before.id == "candidate":
        before = before.model_copy(update={"id": "baseline"})
    after = candidate_cell(sides.candidate, sides.new, sides.matrix, nearest)
    if lane == "gpu":
        before, after = (c.model_copy(update={"id": f"{c.id}-gpu", "lane": "gpu"}) for c in (before, after))
    return before, after


def _prepared(
    config: GateConfig, sides: Sides, cells: tuple[Cell, Cell], host: Mapping[str, str], now: dt.datetime
) -> Prepared:
    """A run of exactly these two cells on one subject."""
    known = cell_of_release(sides.matrix, sides.old.name) or sides.matrix.cells[-1]
    base = prepare(replace(config.run, selection=Selection(patterns=(known.id,))), host, now)
    chosen = tuple(dict.fromkeys(cells))
    plan = base.plan.model_copy(update={"planned": tuple(cell.id for cell in chosen)})
    matrix = base.matrix.model_copy(
        update={"cells": (*base.matrix.cells, *(c for c in chosen if c not in base.matrix.cells))}
    )
    interpreters = {cell.python: base.uv.interpreter(cell.python) for cell in chosen}
    return replace(base, cells=chosen, plan=plan, matrix=matrix, interpreters=interpreters)


def _witnesses(
    config: GateConfig,
    static: tuple[Finding, ...],
    cells: tuple[Cell, Cell],
    results: Mapping[str, CellResult],
    host: Mapping[str, str],
) -> dict[int, tuple[Outcome, Outcome]]:
    """Outcomes by number of the finding, for those that have a witness and are not on both sides."""
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
    runs = [run_witnesses([*sources.values()], cell, config.run.cells / cell.id, host, cancel) for cell in cells]
    return {number: (runs[0][place], runs[1][place]) for place, number in enumerate(sources)}


def _has_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def known_reports(folders: tuple[Path, ...]) -> tuple[Report, ...]:
    """Reports of earlier runs that can be read; one of another schema version is passed over."""
    found = []
    for folder in folders:
        path = folder / "report.json"
        if path.is_file():
            try:
                found.append(Report.model_validate_json(path.read_text(encoding="utf-8")))
            except ValueError:
                continue
    return tuple(found)


def refuse_same(sides: Sides) -> None:
    """A candidate compared with itself proves nothing.

    Raises:
        UsageError: both sides are the same release.
    """
    same_release = sides.baseline.version is not None and sides.baseline.version == sides.candidate.version
    if same_release:
        raise UsageError(
            f"Baseline and candidate are both megatron-core {sides.candidate.version}.", "Name another --baseline."
        )
