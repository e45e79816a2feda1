"""One cell of a run, from its environment to its written result."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.errors import LockTimeoutError
from mcore_compat.files.untrusted import parsed_json, printable, read_bounded
from mcore_compat.judge.cell import described, failed_cell, judge_cell
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.inventory import check_of
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.reuse import CachedResult, ResultCache, cache_key, mismatch, reused_result, sample
from mcore_compat.pipeline.session import Session
from mcore_compat.records import Environment, Provisioned, SuiteRun
from mcore_compat.results import CellResult, Finding
from mcore_compat.run.suite import LOG_LIMIT, SuiteOptions
from mcore_compat.verdicts import Verdict

__all__ = ["LocalWork", "judge_one", "measured"]

# A Ctrl-C on a terminal reaches the installer as well; its failure is then not a verdict.
_INTERRUPT_S = 0.5
_MEASURED = 1000
_TEXT = 2000


@dataclass(frozen=True)
class _Judged:
    """A cell's result before it is written.

    Attributes:
        environment: that it was judged in; None: there was none.
        output: of the installer, if it refused.
        key: what the result may be kept under; None: it may not.
    """

    result: CellResult
    environment: Environment | None = None
    key: str | None = None
    output: str = ""


@dataclass(frozen=True)
class LocalWork:
    """The work of a run's cells on this machine.

    Attributes:
        session: the run.
        display: told of each step.
    """

    session: Session
    display: Display

    def __call__(self, cell: Cell, cancel: threading.Event) -> CellResult | None:
        """See :func:`judge_one`."""
        return judge_one(self.session, cell, self.display, cancel)


def judge_one(session: Session, cell: Cell, display: Display, cancel: threading.Event) -> CellResult | None:
    """Judge one cell and write its result; None: the run was cancelled before there was one.

    Whatever goes wrong with the cell is its result. Only a result that cannot be written ends the run.
    """
    try:
        judged = _judged(session, cell, display, cancel)
    except Exception as exc:  # noqa: BLE001  one cell never ends the run of the others
        judged = _Judged(failed_cell(cell, Verdict.INFRA, "cell-error", f"the cell was not judged: {described(exc)}"))
    if judged is None:
        return None
    if judged.environment is not None:
        session.folder.save_text(f"cells/{cell.id}/lock.txt", judged.environment.lock)
    if judged.output:
        session.folder.save_text(f"cells/{cell.id}/install.log", judged.output)
    written = session.folder.save_result(judged.result)
    if judged.key is not None:
        _cache(session).keep(judged.key, CachedResult(run_id=session.plan.run_id, result=written))
    display.done(written)
    return written


def _cache(session: Session) -> ResultCache:
    return ResultCache(session.lane.environments / ".results")


def _judged(session: Session, cell: Cell, display: Display, cancel: threading.Event) -> _Judged | None:
    """The cell from its environment to its verdict; None: cancelled."""
    lane, options = session.lane, session.options
    suite: SuiteRun | None = None
    kept: CachedResult | None = None
    key: str | None = None
    try:
        with lane.hold(cell, cancel, lambda text: display.phase(cell.id, text)) as held:
            if not held:
                return None
            display.phase(cell.id, "environment")
            provisioned = lane.provision(cell)
            environment = provisioned.environment
            key = _key(session, cell, environment)
            kept = _cache(session).find(key) if options.reuse and key is not None else None
            if kept is not None and cell.id not in sample(session.plan.run_id, session.plan.planned):
                return _Judged(reused_result(kept, provisioned.seconds), environment)
            if environment is not None and not cancel.is_set():
                suite = _suite(session, cell, environment, provisioned.seconds, display, cancel)
    except LockTimeoutError as exc:
        provisioned = Provisioned(0.0, None, Verdict.INFRA, exc.problem.rstrip("."), exc.next_step)
    interrupted = cancel.wait(_INTERRUPT_S) if provisioned.environment is None else cancel.is_set()
    if interrupted or (suite is not None and suite.finished.cancelled):
        return None
    judged = judge_cell(
        cell, provisioned, suite, session.inventory, session.expectations, session.today,
        subject=options.subject, rerun=lambda check: lane.rerun(cell, check), package=lane.package,
    )  # fmt: skip
    notes = measured(session.folder.cell(cell.id) / "reportlog.jsonl")
    judged = judged.model_copy(update={"findings": (*judged.findings, *notes)})
    if kept is not None and key is not None and (against := mismatch(kept, judged)) is not None:
        _cache(session).forget(key)
        judged = against
    return _Judged(judged, provisioned.environment, key, provisioned.output)


def _suite(
    session: Session, cell: Cell, environment: Environment, seconds: float, display: Display, cancel: threading.Event
) -> SuiteRun:
    how = "reused" if environment.reused else "made"
    display.phase(cell.id, f"environment {how} and verified in {seconds:.1f} s, suite started")
    options = SuiteOptions(
        session.suite_folder,
        session.plan.profile,
        session.options.workers,
        only=session.options.only,
        subject=session.options.subject,
        package=session.lane.package,
    )
    out = session.folder.cell(cell.id)
    ran = session.suite(
        cell, environment, options, out, session.host, cancel, lambda count: display.cases(cell.id, count)
    )
    assert isinstance(ran, SuiteRun)
    _ = session.suite_folder  # still what it was, so the checks that ran are those that the report names
    return ran


def measured(log: Path) -> tuple[Finding, ...]:
    """What checks measured and want reported (pytest's ``record_property``); it does not count against a cell."""
    try:
        lines = read_bounded(log, LOG_LIMIT).split("\n")
    except OSError:
        return ()
    found: list[Finding] = []
    for line in lines:
        if len(found) >= _MEASURED:
            break
        try:
            entry = parsed_json(line) if line.strip() else {}
            if entry.get("when") == "teardown":
                check = printable(check_of(entry["nodeid"]), _TEXT)
                for name, value in entry.get("user_properties") or ():
                    found.append(Finding(kind="measured", message=printable(f"{name}: {value}", _TEXT), check=check))
        except (ValueError, TypeError, AttributeError, LookupError):
            break  # the judge says that the log is incomplete
    return tuple(found)


def _key(session: Session, cell: Cell, environment: Environment | None) -> str | None:
    """What the cell's result may be kept under; None if something that decides it cannot be named.

    The content of a source or of a subject from a package is not known here, and one check alone is not a result. An
    ordinary suite depends on the project's package, whose digest is among the inputs; an editable one can change while
    the run goes on.
    """
    options, package = session.options, session.lane.package
    known = options.subject.is_ours or not options.subject.is_fused
    editable = package is not None and package.source is not None
    if environment is None or cell.source is not None or not known or editable or options.only is not None:
        return None
    how: dict[str, str | int] = {"profile": session.plan.profile, "workers": options.workers}
    return cache_key(cell, environment, session.plan.inputs, how, session.expectations, session.host, session.today)
