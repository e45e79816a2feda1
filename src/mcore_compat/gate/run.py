"""The gate from a name to a report: read both sources, run both cells and the witnesses, pair, decide."""

from __future__ import annotations

import datetime as dt
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from mcore_compat.gate.cells import cell_of_release
from mcore_compat.gate.model import GateFinding, GateReport, Tier
from mcore_compat.gate.sides import Sides, paired_cells, static_findings
from mcore_compat.gate.steps import Ran, compared, concluded, witnesses_of
from mcore_compat.gate.witness import Outcome
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.selection import Selection
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.run_folder import new_run_id
from mcore_compat.pipeline.session import Prepared, RunConfig, execute, prepare
from mcore_compat.results import CellResult, Report
from mcore_compat.verdicts import Verdict

type MakeDisplay = Callable[[int], AbstractContextManager[Display]]

__all__ = ["GateConfig", "run_gate"]


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
    pairs: tuple[GateFinding, ...] = ()
    results: dict[str, CellResult] = {}
    outcomes: dict[int, tuple[Outcome, Outcome]] = {}
    report: Report | None = None
    run_id = new_run_id(now)
    if config.static_only:
        tiers.append(Tier(name="cpu", ran=False, note="not asked for"))
    else:
        for lane in ("cpu", "gpu"):
            if lane == "gpu" and not config.run.subject.is_ours:
                tiers.append(Tier(name="gpu", ran=False, note="its suite judges this project's own library only"))
                continue
            if lane == "gpu" and not _has_gpu():
                tiers.append(Tier(name="gpu", ran=False, note="this host has no GPU"))
                continue
            before, after = _in_lane(paired_cells(sides), lane)
            begun = time.monotonic()
            options = _run_of(config.run, lane)

            def once(options: RunConfig = options, cells: tuple[Cell, Cell] = (before, after)) -> Ran:
                prepared = _prepared(options, sides, cells, host, now)
                return Ran(_executed(prepared, display), prepared.folder)

            first, paired = compared(once, (before, after), rerun=config.rerun)
            judged = first.cells
            tiers.append(Tier(name=lane, ran=True, seconds=round(time.monotonic() - begun, 1)))
            pairs += paired
            if lane == "cpu":
                results = {"old": judged[before.id], "new": judged[after.id]}
                report, run_id = first.report, first.report.run_id
                outcomes, tier = witnesses_of(static, (before, after), results, config.run.cells, host)
                tiers.append(tier)
                if Verdict.INFRA in {r.verdict for r in results.values()}:
                    break
    return concluded(sides, static, outcomes, pairs, tiers, results, run_id, report), report


def _executed(run: Prepared, make: MakeDisplay) -> Report:
    with make(len(run.cells)) as display:
        return execute(run, display)


def _in_lane(cells: tuple[Cell, Cell], lane: str) -> tuple[Cell, Cell]:
    if lane == "cpu":
        return cells
    before, after = (cell.model_copy(update={"id": f"{cell.id}-gpu", "lane": "gpu"}) for cell in cells)
    return before, after


def _run_of(run: RunConfig, lane: str) -> RunConfig:
    """A GPU cell runs the GPU lane's suite: its bounds are those of bf16 on the device."""
    if lane == "cpu":
        return run
    inventory = run.root / "compat_matrix" / "inventory-gpu.toml"
    return replace(run, suite=run.root / "tests" / "gpu", inventory=inventory, profile="gpu", workers=0)


def _prepared(
    run: RunConfig, sides: Sides, cells: tuple[Cell, Cell], host: Mapping[str, str], now: dt.datetime
) -> Prepared:
    """A run of exactly these two cells on one subject."""
    known = cell_of_release(sides.matrix, sides.old.name) or sides.matrix.cells[-1]
    base = prepare(replace(run, selection=Selection(patterns=(known.id,))), host, now)
    chosen = tuple(dict.fromkeys(cells))
    plan = base.plan.model_copy(update={"planned": tuple(cell.id for cell in chosen)})
    matrix = base.matrix.model_copy(
        update={"cells": (*base.matrix.cells, *(c for c in chosen if c not in base.matrix.cells))}
    )
    interpreters = {cell.python: base.uv.interpreter(cell.python) for cell in chosen}
    return replace(base, cells=chosen, plan=plan, matrix=matrix, interpreters=interpreters)


def _has_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout
