"""Says how a run is getting on: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from mcore_compat.results import CellResult

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "display_for"]


class Display(Protocol):
    """Told of each step, from any thread."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def phase(self, cell_id: str, phase: str) -> None:
        """A cell has entered a phase."""

    def cases(self, cell_id: str, count: int) -> None:
        """So many cases of a cell's suite have run."""

    def done(self, result: CellResult) -> None:
        """A cell is judged."""


class PlainDisplay:
    """One line a phase and a cell; nothing is drawn over."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def phase(self, cell_id: str, phase: str) -> None:
        """See :class:`Display`."""
        self._line(f"{cell_id}: {phase}")

    def cases(self, cell_id: str, count: int) -> None:
        """See :class:`Display`."""

    def done(self, result: CellResult) -> None:
        """See :class:`Display`."""
        with self._lock:
            self._done += 1
        checks = result.checks
        why = f" · {result.reason}" if result.reason else ""
        self._line(f"{result.id}: {result.verdict.value} · {checks.passed} of {checks.planned} checks passed{why}")

    def _line(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        with self._lock:
            self._console.print(
                f"[{self._done}/{self._total}] {seconds:5.0f} s  {text}", markup=False, highlight=False, soft_wrap=True
            )


class LiveDisplay:
    """A bar over all cells and a line for each that is running."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._all = self._progress.add_task("cells", total=total, note="")
        self._running: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def phase(self, cell_id: str, phase: str) -> None:
        """See :class:`Display`."""
        with self._lock:
            if cell_id not in self._running:
                self._running[cell_id] = self._progress.add_task(f"  {cell_id}", total=None, note="")
            self._progress.update(self._running[cell_id], note=phase)

    def cases(self, cell_id: str, count: int) -> None:
        """See :class:`Display`."""
        with self._lock:
            if cell_id in self._running:
                self._progress.update(self._running[cell_id], completed=count, note="suite")

    def done(self, result: CellResult) -> None:
        """See :class:`Display`."""
        with self._lock:
            task = self._running.pop(result.id, None)
            if task is not None:
                self._progress.remove_task(task)
            self._progress.advance(self._all)
            self._progress.console.print(f"{result.id:28} {result.verdict.value:12} {result.reason}", markup=False)


def display_for(console: Console, total: int) -> Display:
    """The display that suits where the output goes."""
    return LiveDisplay(console, total) if console.is_terminal else PlainDisplay(console, total)
