"""The folder of a run: written piece by piece, each piece whole or not at all, none with an absolute path in it.

``reports/<run-id>/run.json`` is written first, ``cells/<id>/result.json`` as soon as a cell is judged, ``report.json``
and ``report.md`` last; ``reports/latest`` names the newest run that came to its end.
"""

from __future__ import annotations

import datetime as dt
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcore_compat.errors import ReportError, UsageError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.files.digest import digest_of_bytes
from mcore_compat.files.scrub import Scrubber
from mcore_compat.results import CellResult, Report

__all__ = ["PlannedShard", "RunFolder", "RunKind", "RunPlan", "new_run_id", "newest_unfinished"]

# Locked as long as a process works on the run; the kernel releases it when the process ends.
_ALIVE = ".alive"
# What a run is part of: somebody's own run of a suite, or a step of a gate, a bisection, a collection.
RunKind = Literal["run", "gpu", "gate", "bisect", "collect"]


class PlannedShard(BaseModel):
    """Which part of a plan a run is.

    Attributes:
        index: from 1.
        count: number of parts.
        whole: ids of the cells of all parts, in the order of the matrix.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int = Field(ge=1)
    count: int = Field(ge=1)
    whole: tuple[str, ...]


class RunPlan(BaseModel):
    """What a run set out to do; enough to go on with it.

    Attributes:
        kind: what the run is part of.
        planned: ids of its cells.
        inputs: digests of everything that a result depends on, by name.
        shard: the part of a larger plan that this run is; None: it is a run of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    kind: RunKind
    started: str
    planned: tuple[str, ...]
    profile: str
    inputs: Mapping[str, str]
    shard: PlannedShard | None = None


@dataclass(frozen=True)
class RunFolder:
    """One run's folder.

    Attributes:
        path: ``reports/<run-id>``.
        scrubber: applied to everything written.
    """

    path: Path
    scrubber: Scrubber
    alive: FileLock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Name the lock that says that a process works on this run; it is not taken yet."""
        object.__setattr__(self, "alive", FileLock(self.path / _ALIVE, thread_local=False))

    @classmethod
    def create(cls, reports: Path, plan: RunPlan, scrubber: Scrubber) -> RunFolder:
        """A new run's folder, with its plan in it.

        Raises:
            ReportError: it cannot be written; better to know it before hours of work than after.
        """
        folder = cls(reports / plan.run_id, scrubber)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise _cannot_write(folder.path, exc) from exc
        folder.keep_alive()  # before its plan can be seen: what nobody works on, somebody else may resume
        folder._json("run.json", plan.model_dump(mode="json"))
        return folder

    def keep_alive(self) -> None:
        """Say that this process works on the run, until it releases ``alive`` or ends in any way.

        Raises:
            UsageError: another process does.
        """
        try:
            self.alive.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"Run {self.path.name} is still running.", "Wait for it, or start a new run, without --resume."
            ) from None
        except OSError as exc:
            raise _cannot_write(self.path / _ALIVE, exc) from exc

    def cell(self, cell_id: str) -> Path:
        """Where a cell's results go."""
        return self.path / "cells" / cell_id

    def save_result(self, result: CellResult) -> CellResult:
        """Write a cell's result and scrub what its processes left; returns the result as written."""
        folder = self.cell(result.id)
        clean = CellResult.model_validate(self.scrubber.data(result.model_dump(mode="json")))
        try:
            for name in ("output.log", "reportlog.jsonl"):
                if (folder / name).is_file():
                    self.scrubber.file(folder / name)
            for path in (*folder.glob("facts*.json"), *folder.glob("origins-*.json")):
                self.scrubber.file(path)
        except OSError as exc:
            raise _cannot_write(folder / (exc.filename or ""), exc) from exc
        path = self._json(f"cells/{result.id}/result.json", clean.model_dump(mode="json"))
        _replace(path.with_suffix(".sha256"), self._seal(path) + "\n")
        return clean

    def result(self, cell_id: str) -> CellResult | None:
        """The cell's result, or None if it has none that can be read and is as this run has written it."""
        path = self.cell(cell_id) / "result.json"
        try:
            result = CellResult.model_validate_json(path.read_text(encoding="utf-8"))
            intact = path.with_suffix(".sha256").read_text(encoding="utf-8").strip() == self._seal(path)
        except (OSError, ValidationError):
            return None
        return result if intact and result.id == cell_id else None

    def _seal(self, result: Path) -> str:
        """Digest of a result and of the plan that it belongs to."""
        return digest_of_bytes((self.path / "run.json").read_bytes() + b"\0" + result.read_bytes())

    def save_text(self, name: str, text: str) -> Path:
        """Write a text artefact, scrubbed."""
        path = self.path / name
        _replace(path, self.scrubber.text(text))
        return path

    def save_report(self, report: Report) -> Path:
        """Write ``report.json``."""
        return self._json("report.json", report.model_dump(mode="json"))

    def publish(self) -> None:
        """Make ``reports/latest`` name this run."""
        link = self.path.parent / "latest"
        temporary = self.path.parent / f".latest-{secrets.token_hex(4)}"
        try:
            temporary.symlink_to(self.path.name)
            temporary.replace(link)
        except OSError as exc:
            raise _cannot_write(link, exc) from exc

    def _json(self, name: str, data: Any) -> Path:
        path = self.path / name
        _replace(path, json.dumps(self.scrubber.data(data), indent=2, ensure_ascii=False) + "\n")
        return path


def new_run_id(now: dt.datetime | None = None) -> str:
    """A name that sorts by time and is never used twice."""
    now = now or dt.datetime.now(dt.UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def newest_unfinished(reports: Path, kind: RunKind) -> RunPlan:
    """The plan of the newest run of this kind that has no report yet and that no process works on.

    Raises:
        UsageError: there is none.
    """
    running = []
    for path in sorted(reports.glob("*/run.json"), reverse=True):
        if path.parent.is_symlink() or (path.parent / "report.json").exists():
            continue
        try:
            plan = RunPlan.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            continue
        if plan.kind != kind:
            continue
        if not _works_on(path.parent):
            return plan
        running.append(plan.run_id)
    if running:
        raise UsageError(
            f"There is no interrupted run to resume: {running[0]} is still running.",
            "Wait for it, or start a new one, without --resume.",
        )
    raise UsageError("There is no interrupted run to resume.", "Start a new one, without --resume.")


def _works_on(folder: Path) -> bool:
    """Whether a process works on the run."""
    lock = FileLock(folder / _ALIVE)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that cannot be written is nobody's work
        return False


def _replace(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as exc:
        raise _cannot_write(path, exc) from exc


def _cannot_write(path: Path, exc: OSError) -> ReportError:
    return ReportError(
        f"{path.parent.name}/{path.name} cannot be written: {exc.strerror}.",
        "Make room, or name another folder with --report-dir; a run without its report is not green.",
    )
