"""Merges the shards of one run into the report that the whole run would have given."""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.errors import MergeError, UsageError
from mcore_compat.files.scrub import Scrubber
from mcore_compat.judge.criteria import found
from mcore_compat.pipeline.assemble import ASSEMBLED, Exceptions, assemble
from mcore_compat.pipeline.declared import declared, digests
from mcore_compat.pipeline.run_folder import PlannedShard, RunFolder, RunPlan, new_run_id
from mcore_compat.project import Project
from mcore_compat.results import CellResult, Finding, Report
from mcore_compat.verdicts import Verdict

__all__ = ["Merged", "Shard", "measured_seconds", "merge", "read_shards"]


@dataclass(frozen=True)
class Shard:
    """A run that is a part of another one.

    Attributes:
        folder: of the run.
        plan: of the run; its ``shard`` is set.
        report: None if the run did not come to its end.
    """

    folder: RunFolder
    plan: RunPlan
    report: Report | None

    @property
    def part(self) -> PlannedShard:
        """Which part it is."""
        assert self.plan.shard is not None
        return self.plan.shard

    @property
    def name(self) -> str:
        """For messages."""
        return f"shard {self.part.index}/{self.part.count} (run {self.plan.run_id})"


@dataclass(frozen=True)
class Merged:
    """The merged run.

    Attributes:
        folder: with the files of all cells in it; the report is not written yet.
        report: of the whole run.
        project: whose data the shards were run with.
    """

    folder: RunFolder
    report: Report
    project: Project


def read_shards(paths: Iterable[Path]) -> tuple[Shard, ...]:
    """The shards in these folders, in their order within the plan.

    Raises:
        UsageError: a folder is not that of a run.
        MergeError: they are not shards of one run, or overlap.
    """
    shards = [_shard(path) for path in paths]
    if not shards:
        raise UsageError("There is no run to merge.", "Name the folders of the shards' runs.")
    for other in shards[1:]:
        _same_request(shards[0], other)
    owner: dict[str, Shard] = {}
    for shard in shards:
        for cell_id in shard.plan.planned:
            if cell_id in owner:
                raise MergeError(
                    f"Cell {cell_id} is in {owner[cell_id].name} and in {shard.name}.",
                    "Give each shard once; all shards need the same commit and the same --durations.",
                )
            if cell_id not in shard.part.whole:
                raise MergeError(
                    f"Cell {cell_id} of {shard.name} is not in the plan that it says it is a part of.",
                    "Run this shard again.",
                )
            owner[cell_id] = shard
    return tuple(sorted(shards, key=lambda shard: shard.part.index))


def merge(project: Project, shards: Sequence[Shard], *, now: dt.datetime | None = None) -> Merged:
    """Merge shards into a new run of ``project``.

    A cell without a result, and a shard that is missing or did not come to its end, make the run ``unproven``.

    Args:
        project: its data must be those that the shards were run with.
        shards: as :func:`read_shards` returns them.
        now: time of the merge, for the run's name.

    Raises:
        MergeError: the data differ, or no shard has a report.
        ReportError: the folder cannot be written.
    """
    first = shards[0]
    reports = [shard.report for shard in shards if shard.report is not None]
    if not reports:
        raise MergeError("None of these shards has a report.", "Resume them with --resume, then merge again.")
    project = _with_inventory_of(project, first.plan)
    matrix = matrix_of(project)
    _, expectations = declared(project)
    plan = first.plan.model_copy(
        update={
            "run_id": new_run_id(now),
            "started": min(shard.plan.started for shard in shards),
            "planned": first.part.whole,
            "shard": None,
        }
    )
    roots = {"reports": project.reports, "root": project.root, "tmp": Path(tempfile.gettempdir()), "home": Path.home()}
    folder = RunFolder.create(project.reports, plan, Scrubber(roots))
    judged: dict[str, CellResult] = {}
    for shard in shards:
        for cell_id in shard.plan.planned:
            result = shard.folder.result(cell_id)
            if result is not None:
                shutil.copytree(shard.folder.cell(cell_id), folder.cell(cell_id))
                judged[cell_id] = folder.save_result(result)
    report = assemble(
        plan,
        judged,
        reports[0].subject,
        Exceptions(expectations, matrix.cells),
        suite=reports[0].suite,
        seconds=_wall_seconds(reports),
        findings=_of_runs(reports) + _incomplete(shards),
    )
    return Merged(folder, report, project)


def measured_seconds(path: Path) -> dict[str, float]:
    """How long each cell of a run took, environment included, by cell id; empty if there is no such file.

    Args:
        path: a ``report.json``.

    Raises:
        UsageError: it cannot be read.
    """
    if not path.exists():
        return {}
    try:
        report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as exc:
        raise UsageError(
            f"The durations in {path.name} cannot be read.", "Name the report.json of a run with --durations."
        ) from exc
    return {cell.id: cell.seconds.provision + cell.seconds.suite for cell in report.cells if cell.verdict.green}


def _shard(path: Path) -> Shard:
    try:
        plan = RunPlan.model_validate_json((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError) as exc:
        raise UsageError(f"{path} is not the folder of a run.", "Name folders that have a run.json.") from exc
    if plan.shard is None:
        raise MergeError(f"Run {plan.run_id} is not a shard.", "Merge runs that were started with --shard i/n.")
    try:
        report = Report.model_validate_json((path / "report.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        report = None
    except (OSError, ValidationError) as exc:
        raise MergeError(f"The report of run {plan.run_id} cannot be read.", "Run this shard again.") from exc
    if report is not None and report.run_id != plan.run_id:
        raise MergeError(
            f"The folder of run {plan.run_id} has the report of run {report.run_id}.", "Run this shard again."
        )
    return Shard(RunFolder(path, Scrubber({})), plan, report)


def _same_request(one: Shard, other: Shard) -> None:
    """Refuse two shards that were not asked for as parts of one run."""
    asked = {
        "kind": (one.plan.kind, other.plan.kind),
        "profile": (one.plan.profile, other.plan.profile),
        "number of shards": (one.part.count, other.part.count),
        "cells of all shards": (one.part.whole, other.part.whole),
    }
    names = sorted({*one.plan.inputs, *other.plan.inputs})
    asked |= {name: (one.plan.inputs.get(name, ""), other.plan.inputs.get(name, "")) for name in names}
    differing = [name for name, (mine, theirs) in asked.items() if mine != theirs]
    if differing:
        raise MergeError(
            f"S{one.name[1:]} and {other.name} are not parts of one run: {', '.join(differing)} differ.",
            "Run all shards from one commit with the same options.",
        )


def _with_inventory_of(project: Project, plan: RunPlan) -> Project:
    """The project with the suite that the shards ran, if its data are those of the shards."""
    suites = (project, project.gpu, project.gpu_parallel)
    wanted = {name: plan.inputs.get(name) for name in ("matrix", "expectations", "inventory")}
    differing: list[str] = []
    for candidate in suites:
        different = [name for name, digest in digests(candidate).items() if digest != wanted[name]]
        if not different:
            return candidate
        differing = differing or different
    raise MergeError(
        f"The shards were run with other data than this checkout has: {', '.join(differing)} differ.",
        "Merge in a checkout of the commit that the shards were run from, with their --data and --inventory.",
    )


def _of_runs(reports: Sequence[Report]) -> tuple[Finding, ...]:
    """What the shards' reports say about their runs, each thing once."""
    kept = (finding for report in reports for finding in report.findings if finding.kind not in ASSEMBLED)
    return tuple(dict.fromkeys(kept))


def _incomplete(shards: Sequence[Shard]) -> tuple[Finding, ...]:
    given = {shard.part.index for shard in shards}
    count = shards[0].part.count
    missing = tuple(
        found(Verdict.UNPROVEN, "shard-missing", f"shard {index}/{count} is missing", "Run it, and merge again.")
        for index in range(1, count + 1)
        if index not in given
    )
    unfinished = tuple(
        found(
            Verdict.UNPROVEN,
            "shard-unfinished",
            f"{shard.name} did not come to its end",
            "Resume it with --resume, and merge again.",
        )
        for shard in shards
        if shard.report is None
    )
    return missing + unfinished


def _wall_seconds(reports: Sequence[Report]) -> float:
    """From the start of the first shard to the end of the last."""
    starts = [dt.datetime.fromisoformat(report.started).timestamp() for report in reports]
    ends = [start + report.seconds for start, report in zip(starts, reports, strict=True)]
    return max(ends) - min(starts)
