"""Where cells run: an executor takes cells and calls the work for each. Threads of this process are the default."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.session import Session
from mcore_compat.results import CellResult

__all__ = ["CellWork", "Executor", "LocalThreads", "Work", "default_jobs"]

# Judges one cell; None: the run was cancelled before the cell had a result.
type Work = Callable[[Cell, threading.Event], CellResult | None]

_POLL_S = 0.5


class CellWork(Protocol):
    """The work of a run's cells, for an executor that does it elsewhere: what is run, and who is told."""

    @property
    def session(self) -> Session:
        """The run."""

    @property
    def display(self) -> Display:
        """Told of each step."""

    def __call__(self, cell: Cell, cancel: threading.Event) -> CellResult | None:
        """Judge one cell here; None: the run was cancelled before the cell had a result."""


class Executor(Protocol):
    """Runs the work of cells somewhere."""

    def run(self, cells: Sequence[Cell], work: CellWork, on_result: Callable[[CellResult], None]) -> None:
        """Call ``work`` for each cell, and ``on_result`` in this thread with each result as it comes.

        An exception of the work, and Ctrl-C, cancel the other cells and are raised when these have ended.
        """


@dataclass(frozen=True)
class LocalThreads:
    """Threads of this process, each with the child processes of one cell.

    Attributes:
        jobs: cells at a time.
    """

    jobs: int = 1

    def run(self, cells: Sequence[Cell], work: Work, on_result: Callable[[CellResult], None]) -> None:
        """See :class:`Executor`."""
        cancel = threading.Event()
        with ThreadPoolExecutor(max_workers=max(1, self.jobs), thread_name_prefix="cell") as pool:
            pending: set[Future[CellResult | None]] = {pool.submit(work, cell, cancel) for cell in cells}
            try:
                while pending:
                    done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        if result is not None:
                            on_result(result)
            except BaseException:
                cancel.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def default_jobs() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
