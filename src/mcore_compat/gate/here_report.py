"""The verdict on one interpreter's megatron-core, as one file: every rank has its own, and the first joins them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.gate.here import Found, Here
from mcore_compat.results import CellResult
from mcore_compat.verdicts import Verdict, worst

__all__ = [
    "Edit",
    "HereReport",
    "Place",
    "joined",
    "part_of",
    "rank_of",
    "report_of",
    "text_of",
    "waiting_for",
    "write",
]

_RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_POLL_S = 1.0
# Clocks of two hosts may differ by so much; an older file is of an earlier run.
_CLOCKS_S = 120.0
_SHOWN = 12


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Edit(_Model):
    """A local edit against the nearest release; see :class:`mcore_compat.gate.here.LocalEdit`."""

    symbol: str
    where: str
    kind: Literal["added", "removed", "changed"]
    level: str = ""
    message: str = ""


class HereReport(_Model):
    """One verdict file.

    Attributes:
        verdict: the worst of all ranks.
        reason: why; empty if it is green.
        started: seconds since the epoch, of the first rank.
        python: version of the interpreter.
        versions: by distribution.
        attribute: what megatron.core says of its version.
        nearest: the release that its source is nearest to.
        edits: what reads otherwise than in that release, of what a patch depends on.
        changed: files that differ from what was installed.
        suite: what was run; "" if only the source was read.
        rank: that wrote it.
        world_size: ranks of the run.
        cells: results by rank; None: that rank left none.
    """

    schema_version: Literal[1] = 1
    verdict: Verdict
    reason: str = ""
    started: float
    python: str
    versions: dict[str, str]
    attribute: str | None
    nearest: str
    edits: tuple[Edit, ...] = ()
    changed: tuple[str, ...] = ()
    suite: str = ""
    rank: int = 0
    world_size: int = 1
    cells: tuple[CellResult | None, ...] = ()


class Place(_Model):
    """Which rank of how many this process is."""

    rank: int = 0
    size: int = 1


def rank_of(host: Mapping[str, str]) -> Place:
    """What the launcher says: torchrun's variables, else Slurm's, else Open MPI's; none: one process.

    Raises:
        UsageError: the variables contradict each other.
    """
    for rank, size in _RANKS:
        if rank in host and size in host:
            try:
                place = Place(rank=int(host[rank]), size=int(host[size]))
            except ValueError:
                place = Place(rank=-1)
            if not 0 <= place.rank < place.size:
                problem = f"{rank}={host[rank]} is not a rank of {size}={host[size]}."
                raise UsageError(problem, "Unset both, or start with a launcher.")
            return place
    return Place()


def report_of(
    here: Here, found: Found, cell: CellResult | None, suite: str, place: Place, started: float
) -> HereReport:
    """The report of one rank; without a cell nothing was run, so that it cannot be green."""
    if cell is None:
        verdict, reason = Verdict.UNPROVEN, "the source was read and nothing was run"
    else:
        verdict, reason = cell.verdict, cell.reason
    return HereReport(
        verdict=verdict,
        reason=reason,
        started=started,
        python=here.python,
        versions=here.distributions,
        attribute=here.attribute,
        nearest=found.nearest,
        edits=tuple(Edit.model_validate(vars(edit)) for edit in found.edits),
        changed=here.changed,
        suite=suite,
        rank=place.rank,
        world_size=place.size,
        cells=(cell,),
    )


def joined(first: HereReport, others: Callable[[int], HereReport | None]) -> HereReport:
    """One report of all ranks; a rank without a report, or with another megatron-core, is never passed over.

    Args:
        first: of rank 0.
        others: the report of a rank, or None if it left none.
    """
    reports: list[HereReport | None] = [first, *(others(rank) for rank in range(1, first.world_size))]
    lost = [rank for rank, report in enumerate(reports) if report is None]
    there = [report for report in reports if report is not None]
    differing = [r.rank for r in there if _packages(r) != _packages(first)]
    verdicts = [report.verdict for report in there]
    reasons = [f"rank {r.rank}: {r.reason}" if first.world_size > 1 else r.reason for r in there if not r.verdict.green]
    if differing:
        verdicts.append(Verdict.INFRA)
        reasons.insert(0, f"rank {differing[0]} has other packages than rank 0")
    if lost:
        verdicts.append(Verdict.UNPROVEN)
        reasons.append(f"rank {lost[0]} left no result" + (f", nor did {len(lost) - 1} more" if len(lost) > 1 else ""))
    cells = tuple(None if report is None else report.cells[0] for report in reports)
    return first.model_copy(
        update={"verdict": worst(verdicts), "reason": reasons[0] if reasons else "", "cells": cells}
    )


def _packages(report: HereReport) -> tuple[object, ...]:
    """What must be the same in all ranks."""
    return report.python, report.versions, report.nearest, report.edits, report.changed


def part_of(out: Path, rank: int) -> Path:
    """The file of one rank, beside the verdict file."""
    return out.with_name(f"{out.stem}.rank-{rank}{out.suffix}")


def write(report: HereReport, path: Path) -> None:
    """Write a report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, report.model_dump_json(indent=1) + "\n")


def waiting_for(out: Path, first: HereReport, limit_s: float) -> Callable[[int], HereReport | None]:
    """Reads the reports of other ranks, and waits for them; a file of an earlier run does not count."""
    end = time.monotonic() + limit_s

    def other(rank: int) -> HereReport | None:
        while True:
            try:
                report = HereReport.model_validate_json(part_of(out, rank).read_text(encoding="utf-8"))
            except (OSError, ValidationError):
                report = None
            if report is not None and report.started >= first.started - _CLOCKS_S and report.rank == rank:
                return report
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)

    return other


def text_of(report: HereReport) -> str:
    """The report on one screen."""
    held = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"megatron-core here: {report.attribute or 'without a version'}; nearest release: {report.nearest}",
        f"Python {report.python}; {held}",
        *_listed("file differs from what was installed", "files differ from what was installed", report.changed),
        *_listed(
            f"local edit against {report.nearest}",
            f"local edits against {report.nearest}",
            [
                ", ".join(part for part in (f"{edit.symbol} {edit.kind}", edit.where, edit.message) if part)
                for edit in report.edits
            ],
        ),
    ]
    for rank, cell in enumerate(report.cells):
        if cell is not None:
            counts = f"{cell.checks.passed} of {cell.checks.planned} checks passed"
            lines.append(f"rank {rank}: {cell.verdict.value}, {counts}" + (f"; {cell.reason}" if cell.reason else ""))
        elif report.suite:
            lines.append(f"rank {rank}: no result")
    lines.append(f"{report.verdict.label}" + (f": {report.reason}" if report.reason else ""))
    return "\n".join(lines) + "\n"


def _listed(one: str, many: str, items: Sequence[str]) -> list[str]:
    if not items:
        return [f"no {many}"]
    shown = [f"  {item}" for item in items[:_SHOWN]]
    more = [f"  … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"{len(items)} {one if len(items) == 1 else many}:", *shown, *more]
