"""Options that several commands have: one spelling, one meaning, one parser."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from mcore_compat.errors import UsageError
from mcore_compat.matrix.cells import Cell, Matrix
from mcore_compat.matrix.selection import Selection, Shard, plan_cells
from mcore_compat.pipeline.executors import default_jobs
from mcore_compat.pipeline.merge import measured_seconds
from mcore_compat.pipeline.run_folder import PlannedShard
from mcore_compat.project import Project
from mcore_compat.subjects.selection import BUILT_IN

__all__ = [
    "PROFILES",
    "CellsDir",
    "Classes",
    "DataDir",
    "Durations",
    "Inventory",
    "Jobs",
    "Profile",
    "ReportDir",
    "Root",
    "Select",
    "ShardText",
    "SubjectText",
    "Suite",
    "Workers",
    "check_profile",
    "console",
    "interrupt_on_sigterm",
    "planned",
    "selection",
    "shard_seconds",
    "shown",
]

PROFILES = ("dev", "ci", "nightly", "gpu")
_PLAIN_WIDTH = 180

Root = Annotated[Path | None, typer.Option("--root", help="The project's root; default: found upwards from here.")]
Select = Annotated[
    list[str] | None,
    typer.Option("--select", "-s", help="Shell pattern over cell ids; repeatable, or separated by commas."),
]
Classes = Annotated[bool, typer.Option("--classes", help="One cell per contract class, and every backport.")]
ShardText = Annotated[
    str | None, typer.Option("--shard", help="Part i of n parts that take about equally long, written i/n.")
]
Durations = Annotated[
    Path | None,
    typer.Option("--durations", help="report.json whose durations balance shards; default: docs/results/cpu."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of cells to run in parallel.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="pytest-xdist workers inside each cell; 0: none.")]
Profile = Annotated[str, typer.Option("--profile", help=f"Hypothesis profile: {', '.join(PROFILES)}.")]
ReportDir = Annotated[Path | None, typer.Option("--report-dir", help="Where runs are written; default: reports/.")]
CellsDir = Annotated[Path | None, typer.Option("--cells-dir", help="Where environments are kept; default: .cells/.")]
Suite = Annotated[Path | None, typer.Option("--suite", help="Folder of the suite; default: tests/compat.")]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", help="The required checks; default: inventory.toml beside the matrix.")
]
DataDir = Annotated[
    Path | None, typer.Option("--data", help="Folder of matrix and expectations; default: compat_matrix.")
]
SubjectText = Annotated[
    str | None,
    typer.Option(
        "--subject",
        help=f"What the suite judges: {', '.join(BUILT_IN)}, file.py:Class or module:Class; default: the project.",
    ),
]

JOBS = default_jobs()


def selection(
    select: list[str] | None, classes: bool = False, shard: str | None = None, python: str | None = None
) -> Selection:
    """What the options select.

    Raises:
        SelectionError: the shard is not written as i/n.
    """
    patterns = tuple(part.strip() for text in select or [] for part in text.split(",") if part.strip())
    return Selection(patterns=patterns, classes=classes, python=python, shard=Shard.parse(shard) if shard else None)


def planned(
    project: Project, matrix: Matrix, chosen: Selection, durations: Path | None
) -> tuple[tuple[Cell, ...], PlannedShard | None]:
    """The selected cells, and which part of which plan they are if the selection has a shard.

    Raises:
        UsageError: nothing is selected, or the durations cannot be read.
    """
    if chosen.shard is None:
        return plan_cells(matrix, chosen), None
    whole = tuple(cell.id for cell in plan_cells(matrix, chosen.whole))
    seconds = shard_seconds(project, durations)
    shard = PlannedShard(index=chosen.shard.index, count=chosen.shard.count, whole=whole)
    return plan_cells(matrix, chosen, seconds), shard


def shard_seconds(project: Project, durations: Path | None) -> dict[str, float]:
    """Measured duration by cell id; empty if the project has no committed run and none was named.

    Raises:
        UsageError: the durations cannot be read.
    """
    if durations is not None and not durations.is_file():
        raise UsageError(f"There is no file {durations}.", "Name the report.json of a run with --durations.")
    return measured_seconds(durations or project.measured_report)


def check_profile(profile: str) -> str:
    """The profile, if there is one of that name.

    Raises:
        UsageError: there is none.
    """
    if profile not in PROFILES:
        raise UsageError(f"There is no profile `{profile}`.", f"Choose one of {', '.join(PROFILES)}.")
    return profile


def console() -> Console:
    """As wide as the terminal; elsewhere wide enough that no reason is cut."""
    found = Console()
    return found if found.is_terminal else Console(width=_PLAIN_WIDTH)


def shown(path: Path) -> str:
    """The path relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def interrupt_on_sigterm() -> None:
    """A request to end stops the run as Ctrl-C does: cells are ended, results are kept."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
