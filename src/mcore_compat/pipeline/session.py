"""One run from plan to report: cells side by side, each written down the moment it is judged."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.errors import InfrastructureError, UsageError
from mcore_compat.files.scrub import Scrubber
from mcore_compat.judge.cell import judge_cell, judge_expectations
from mcore_compat.judge.criteria import found
from mcore_compat.matrix.cells import Cell, Matrix
from mcore_compat.matrix.expectations import Expectations, load_expectations
from mcore_compat.matrix.inventory import Inventory, load_inventory
from mcore_compat.matrix.selection import Selection, plan_cells
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.reuse import Earlier, Kept, refuted, reused, sample, what_decides
from mcore_compat.pipeline.run_folder import RunFolder, RunPlan, new_run_id, newest_unfinished
from mcore_compat.provision.project_wheel import build_subject
from mcore_compat.provision.uv import Uv
from mcore_compat.provision.uv_environment import provision
from mcore_compat.records import Environment, ProjectWheel, Provisioned
from mcore_compat.results import CellResult, Report, SubjectInfo
from mcore_compat.run.suite import SuiteOptions, run_suite
from mcore_compat.subjects.selection import OURS, ChosenSubject
from mcore_compat.verdicts import Verdict, worst

__all__ = ["InterruptedRunError", "Prepared", "RunConfig", "default_jobs", "execute", "prepare"]

_LOCK_WAIT_S = 1800


class InterruptedRunError(InfrastructureError):
    """The run was stopped before its end; what it had judged is kept."""


@dataclass(frozen=True)
class RunConfig:
    """What the caller asked for.

    Attributes:
        root: the project's root, holding ``compat_matrix``.
        cells: where environments live.
        reports: where runs are written.
        suite: folder of the property suite.
        inventory: the declared checks.
        data: folder of matrix and expectations; None for ``compat_matrix`` itself.
        jobs: cells side by side.
        workers: pytest-xdist workers inside each cell.
        resume: go on with the newest interrupted run instead of starting one.
        only: run this check alone, for whoever looks at its outcome and not at the verdict.
        subject: the implementation that the suite judges.
        reuse: take a green result of an earlier run where nothing that it depends on has changed.
    """

    root: Path
    cells: Path
    reports: Path
    suite: Path
    inventory: Path
    selection: Selection
    jobs: int
    profile: str
    workers: int = 0
    resume: bool = False
    only: str | None = None
    subject: ChosenSubject = OURS
    data: Path | None = None
    reuse: bool = False


@dataclass(frozen=True)
class Prepared:
    """Everything that a run needs and that does not depend on a cell."""

    config: RunConfig
    matrix: Matrix
    inventory: Inventory
    expectations: Expectations
    cells: tuple[Cell, ...]
    subject: ProjectWheel
    uv: Uv
    interpreters: Mapping[str, Path]
    folder: RunFolder
    plan: RunPlan
    host: Mapping[str, str]


def prepare(config: RunConfig, host: Mapping[str, str], now: dt.datetime) -> Prepared:
    """Read and check everything before the first cell starts.

    Raises:
        UsageError: a file or the selection is wrong, or there is nothing to resume.
        InfrastructureError: uv, the interpreter, the subject's build or the report folder fails.
    """
    data = config.data or config.root / "compat_matrix"
    matrix = load_classified_matrix(data)
    inventory = load_inventory(config.inventory)
    expectations = load_expectations(data / "expectations.toml")
    if config.inventory != data / "inventory.toml":
        # another suite: the exceptions are the property suite's, and would all look unused
        expectations = expectations.about({check.id for check in inventory.check})
    if not config.suite.is_dir():
        raise UsageError(f"There is no suite at {config.suite.name}/.", "Name its folder with --suite.")
    cells = plan_cells(matrix, config.selection)
    resumed = newest_unfinished(config.reports) if config.resume else None
    if resumed is not None:
        cells = tuple(cell for cell in matrix.cells if cell.id in resumed.planned)
    uv = Uv.find(host)
    interpreters = {version: uv.interpreter(version) for version in sorted({cell.python for cell in cells})}
    subject = build_subject(config.root, config.cells / ".subject", uv)
    inputs = {
        "subject": subject.sha256,
        "judged": config.subject.digest,
        "suite": _digest_of_tree(config.suite),
        "matrix": _digest(data / "matrix.toml"),
        "inventory": _digest(config.inventory),
        "expectations": _digest(data / "expectations.toml"),
    }
    scrubber = _scrubber(config, host)
    if resumed is not None:
        changed = sorted(name for name, digest in inputs.items() if resumed.inputs.get(name) != digest)
        if changed:
            raise UsageError(
                f"Run {resumed.run_id} cannot be resumed: {', '.join(changed)} changed since it started.",
                "Start a new run, without --resume.",
            )
        return Prepared(
            config, matrix, inventory, expectations, cells, subject, uv, interpreters,
            RunFolder(config.reports / resumed.run_id, scrubber), resumed, host,
        )  # fmt: skip
    plan = RunPlan(
        run_id=new_run_id(now),
        started=now.isoformat(timespec="seconds"),
        planned=tuple(cell.id for cell in cells),
        profile=config.profile,
        inputs=inputs,
    )
    folder = RunFolder.create(config.reports, plan, scrubber)
    return Prepared(config, matrix, inventory, expectations, cells, subject, uv, interpreters, folder, plan, host)


def execute(run: Prepared, display: Display) -> Report:
    """Judge all cells and return the report; nothing but the cells' own results is written.

    Raises:
        InterruptedRunError: Ctrl-C or a termination signal.
    """
    started = time.monotonic()
    finished = {cell.id: result for cell in run.cells if (result := run.folder.result(cell.id)) is not None}
    for result in finished.values():
        display.done(result)
    cancel = threading.Event()
    waiting = [cell for cell in run.cells if cell.id not in finished]
    with ThreadPoolExecutor(max_workers=max(1, run.config.jobs), thread_name_prefix="cell") as pool:
        futures: dict[Future[CellResult | None], Cell] = {
            pool.submit(_judge_one, run, cell, display, cancel): cell for cell in waiting
        }
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    if result is not None:
                        finished[result.id] = result
        except BaseException as exc:
            cancel.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(exc, KeyboardInterrupt):
                known = sum(run.folder.result(cell.id) is not None for cell in run.cells)
                raise InterruptedRunError(
                    f"The run was interrupted; {known} of {len(run.cells)} cells are judged and kept.",
                    "Go on with `nox -s compat -- --resume`.",
                ) from exc
            raise
    return _report(run, finished, time.monotonic() - started)


def _report(run: Prepared, finished: Mapping[str, CellResult], seconds: float) -> Report:
    results = tuple(finished[cell.id] for cell in run.cells if cell.id in finished)
    lost = [cell_id for cell_id in run.plan.planned if cell_id not in finished]
    findings = judge_expectations(run.expectations, run.matrix.cells, results)
    findings += tuple(
        found(Verdict.UNPROVEN, "cell-lost", f"cell {cell_id} was planned and has no result", "Run it again.")
        for cell_id in lost
    )
    verdicts = [result.verdict for result in results] + [f.verdict for f in findings if f.verdict is not None]
    subject = run.subject
    return Report(
        run_id=run.plan.run_id,
        started=run.plan.started,
        seconds=round(seconds, 1),
        verdict=worst(verdicts),
        subject=SubjectInfo(
            name=subject.name,
            version=subject.version,
            sha256=subject.sha256,
            commit=subject.commit,
            judged=run.config.subject.name,
        ),
        suite_sha256=run.plan.inputs["suite"],
        profile=run.plan.profile,
        planned=run.plan.planned,
        cells=results,
        findings=findings,
    )


def _judge_one(run: Prepared, cell: Cell, display: Display, cancel: threading.Event) -> CellResult | None:
    """One cell from environment to written result; None: interrupted."""
    config = run.config
    out = run.folder.cell(cell.id)
    suite = kept = key = None
    earlier = Earlier(config.cells / ".results")
    try:
        config.cells.mkdir(parents=True, exist_ok=True)
        with FileLock(config.cells / f"{cell.id}.lock", timeout=_LOCK_WAIT_S):
            if cancel.is_set():
                return None
            display.phase(cell.id, "environment")
            provisioned = provision(
                cell, run.matrix.requirements, run.subject, config.cells, run.uv, run.interpreters[cell.python],
                run.host,
            )  # fmt: skip
            environment = provisioned.environment
            key = _key(run, cell, environment)
            kept = earlier.find(key) if config.reuse and key is not None else None
            if kept is not None and cell.id not in sample(run.plan.run_id, run.plan.planned):
                return _written(run, reused(kept, provisioned.seconds), environment, display)
            if environment is not None and not cancel.is_set():
                how = "reused" if environment.reused else "made"
                display.phase(cell.id, f"environment {how} and proved in {provisioned.seconds:.1f} s, suite started")
                options = SuiteOptions(
                    config.suite, run.plan.profile, config.workers, only=config.only, subject=config.subject
                )
                suite = run_suite(
                    cell, environment, options, out, run.host, cancel, lambda count: display.cases(cell.id, count)
                )
    except Timeout:
        provisioned = Provisioned(
            _LOCK_WAIT_S,
            None,
            Verdict.INFRA,
            f"another run held this cell's environment for {_LOCK_WAIT_S} s",
            "Wait for it, or give this run another --cells-dir.",
        )
    # A Ctrl-C on a terminal reaches uv as well; its failure is then no verdict.
    interrupted = cancel.wait(0.5) if provisioned.environment is None else cancel.is_set()
    if interrupted or (suite is not None and suite.finished.cancelled):
        return None
    judged = judge_cell(
        cell, provisioned, suite, run.inventory, run.expectations, _today(), subject=config.subject
    )  # fmt: skip
    if kept is not None and key is not None and (against := refuted(kept, judged)) is not None:
        earlier.forget(key)
        judged = against
    result = _written(run, judged, provisioned.environment, display)
    if key is not None:
        earlier.keep(key, Kept(run_id=run.plan.run_id, result=result))
    return result


def _key(run: Prepared, cell: Cell, environment: Environment | None) -> str | None:
    """What the cell's result may be kept under; None where something that decides it cannot be named.

    The content of a source or of a subject from a package is not known here, and one check alone is no result.
    """
    config = run.config
    if environment is None or cell.source is not None or not config.subject.is_ours or config.only is not None:
        return None
    options: dict[str, str | int] = {"profile": run.plan.profile, "workers": config.workers}
    return what_decides(cell, environment, run.plan.inputs, options, run.expectations, run.host, _today())


def _written(run: Prepared, result: CellResult, environment: Environment | None, display: Display) -> CellResult:
    if environment is not None:
        run.folder.save_text(f"cells/{result.id}/lock.txt", environment.lock)
    written = run.folder.save_result(result)
    display.done(written)
    return written


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()


def _scrubber(config: RunConfig, host: Mapping[str, str]) -> Scrubber:
    roots = {
        "reports": config.reports,
        "cells": config.cells,
        "suite": config.suite,
        "root": config.root,
        "tmp": Path(tempfile.gettempdir()),
    }
    home = host.get("HOME")
    return Scrubber(roots | ({"home": Path(home)} if home else {}))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_of_tree(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            total.update(f"{path.relative_to(folder).as_posix()}\0{_digest(path)}\n".encode())
    return total.hexdigest()


def default_jobs() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
