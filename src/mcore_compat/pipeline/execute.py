"""Run the cells of a session and assemble the report."""

from __future__ import annotations

import time

from mcore_compat.errors import InfrastructureError
from mcore_compat.pipeline.assemble import Exceptions, assemble
from mcore_compat.pipeline.executors import Executor, LocalThreads
from mcore_compat.pipeline.one_cell import LocalWork
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.session import Session
from mcore_compat.results import CellResult, Report, SubjectInfo

__all__ = ["InterruptedRunError", "execute"]


class InterruptedRunError(InfrastructureError):
    """The run was stopped before its end; what it had judged is kept."""


def execute(session: Session, display: Display, executor: Executor | None = None) -> Report:
    """Judge all cells and return the report; each result is written as soon as it is known.

    Raises:
        InterruptedRunError: Ctrl-C or a termination signal.
    """
    started = time.monotonic()
    finished = {cell.id: result for cell in session.cells if (result := session.folder.result(cell.id)) is not None}
    for result in finished.values():
        display.done(result)
    waiting = [cell for cell in session.cells if cell.id not in finished]

    def keep(result: CellResult) -> None:
        if result.id in finished:
            raise InfrastructureError(
                f"Cell {result.id} was judged twice in one run.", "Report this; no result of this run can be trusted."
            )
        finished[result.id] = result

    try:
        (executor or LocalThreads(session.options.jobs)).run(waiting, LocalWork(session, display), keep)
    except KeyboardInterrupt as exc:
        session.folder.alive.release()
        known = sum(session.folder.result(cell.id) is not None for cell in session.cells)
        raise InterruptedRunError(
            f"The run was interrupted; {known} of {len(session.cells)} cells are judged and kept.",
            f"Continue with `{session.options.again}`.",
        ) from exc
    return assemble(
        session.plan,
        finished,
        _subject_info(session),
        Exceptions(session.expectations, session.matrix.cells),
        suite=session.project.suite_name,
        seconds=time.monotonic() - started,
        findings=session.lane.host_findings(),
    )


def _subject_info(session: Session) -> SubjectInfo:
    """Whose suite judged what: this project's, or another one's with the harness that judged it."""
    lane, subject = session.lane, session.options.subject
    wheel = lane.wheel if lane.package is None else lane.package.wheel
    judged = SubjectInfo(
        name=wheel.name,
        version=wheel.version,
        sha256=wheel.sha256,
        commit=wheel.commit,
        judged=subject.name,
        judged_version=subject.peer.version if subject.peer is not None else None,
        judged_sha256=(subject.peer.sha256 or None) if subject.peer is not None else None,
    )
    if not session.project.is_adopter:
        return judged
    if lane.package is None:
        judged = judged.model_copy(update={"name": session.project.title, "version": "without a package"})
    return judged.model_copy(update={"harness": lane.wheel.version, "links": dict(session.project.settings.links)})
