"""Runs on a node of a cluster: judges one cell as on the caller's machine, and returns what it left."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from mcore_compat.judge.criteria import found
from mcore_compat.pipeline.delivery import Delivery, delivered
from mcore_compat.pipeline.one_cell import judge_one
from mcore_compat.pipeline.parcel import Parcel, unpack
from mcore_compat.pipeline.session import Session
from mcore_compat.results import CellResult, Finding
from mcore_compat.verdicts import Verdict

__all__ = ["Say", "judge_on_node", "with_host"]

# Told of a phase (text) or of cases that have run (number).
type Say = Callable[[str | int], None]

_POLL_S = 0.1
_QUIET_S = 0.5


class _Telling:
    """Passes on what a cell does; not more often than somebody can read it."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def phase(self, cell_id: str, phase: str) -> None:
        del cell_id
        self._say(phase)

    def cases(self, cell_id: str, count: int) -> None:
        del cell_id
        if time.monotonic() - self._last >= _QUIET_S:
            self._last = time.monotonic()
            self._say(count)

    def done(self, result: CellResult) -> None:
        """Nothing: the caller says so once it has the result."""


def judge_on_node(parcel: bytes, cell_id: str, store: Path, say: Say) -> Delivery | None:
    """Judge one cell; None: the task was cancelled.

    The cell runs in a thread of its own. A cancellation reaches the main thread as ``KeyboardInterrupt``; it then ends
    the cell's processes, and waits for them.

    Args:
        parcel: a pickled :class:`~mcore_compat.pipeline.parcel.Parcel`.
        cell_id: the cell.
        store: the node's folder for environments.
        say: told of progress.

    Raises:
        InfrastructureError: the parcel cannot be opened here.
    """
    opened: Parcel = pickle.loads(parcel)  # noqa: S301  made by the caller of this very task
    with tempfile.TemporaryDirectory(prefix="mcore-compat-node-") as work:
        session = unpack(opened, cell_id, store, Path(work), os.environ)
        cancel = threading.Event()
        outcome: list[CellResult | BaseException | None] = []
        thread = threading.Thread(target=_judge, args=(session, say, cancel, outcome), name="cell")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_S)
        except KeyboardInterrupt:
            cancel.set()
            thread.join()
            return None
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        if result is None:
            return None
        return delivered(session.folder.cell(session.cells[0].id), with_host(result, session.lane.host_findings()))


def _judge(
    session: Session, say: Say, cancel: threading.Event, outcome: list[CellResult | BaseException | None]
) -> None:
    try:
        outcome.append(judge_one(session, session.cells[0], _Telling(say), cancel))
    except BaseException as exc:  # noqa: BLE001  raised again in the main thread
        outcome.append(exc)


def with_host(result: CellResult, findings: tuple[Finding, ...]) -> CellResult:
    """The result with what there is to say about its node; a node that changed makes the cell ``infra``."""
    against = next((finding for finding in findings if finding.verdict is not None), None)
    changed: dict[str, object] = {"findings": (*result.findings, *findings)}
    if against is not None:
        first = found(Verdict.INFRA, against.kind, against.message, against.next_step)
        rest = tuple(finding for finding in findings if finding is not against)
        changed = {
            "findings": (first, *result.findings, *rest),
            "verdict": Verdict.INFRA,
            "reason": against.message,
        }
    return result.model_copy(update=changed)
