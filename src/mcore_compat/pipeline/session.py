"""What one run is made of. A plain run, a gate, a bisection and the GPU lane all prepare their run here.

The caller chooses the cells and the lane; nothing is selected here.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.errors import InfrastructureError, UsageError
from mcore_compat.files.digest import digest_of_json
from mcore_compat.files.scrub import Scrubber
from mcore_compat.files.sealed import is_sealed, sealed_copy
from mcore_compat.matrix.cells import Cell, Matrix
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.matrix.inventory import Inventory
from mcore_compat.pipeline.declared import declared, digests
from mcore_compat.pipeline.lanes import Lane
from mcore_compat.pipeline.run_folder import PlannedShard, RunFolder, RunKind, RunPlan, new_run_id
from mcore_compat.project import Project
from mcore_compat.records import Package
from mcore_compat.run.suite import run_suite
from mcore_compat.subjects.selection import OURS, ChosenSubject

__all__ = ["RunOptions", "Session", "prepare", "scrubber_of"]


@dataclass(frozen=True)
class RunOptions:
    """How the cells are run.

    Attributes:
        kind: what the run is part of; only a run of the same kind is resumed.
        jobs: cells at a time.
        profile: the Hypothesis profile.
        workers: pytest-xdist workers inside each cell.
        only: run this check alone, for a caller who looks at its outcome and not at the verdict.
        subject: the implementation that the suite judges.
        reuse: take a passing result of an earlier run if nothing that it depends on has changed.
        again: the command that resumes this run after an interruption.
        shard: the part of a larger plan that the cells are.
    """

    kind: RunKind = "run"
    jobs: int = 1
    profile: str = "ci"
    workers: int = 0
    only: str | None = None
    subject: ChosenSubject = OURS
    reuse: bool = False
    again: str = "mcore-compat run --resume"
    shard: PlannedShard | None = None


@dataclass(frozen=True)
class Session:
    """Everything that a run needs and that does not depend on one cell.

    Attributes:
        matrix: as read, with the cells of this run added if it does not have them.
        cells: as the lane runs them.
        suite_copy: the copy of the project's ``suite_base`` that this run uses.
        suite: runs the suite in one cell; a test gives another.
        today: decides which expectations have expired.
    """

    project: Project
    options: RunOptions
    lane: Lane
    matrix: Matrix
    inventory: Inventory
    expectations: Expectations
    cells: tuple[Cell, ...]
    folder: RunFolder
    plan: RunPlan
    host: Mapping[str, str]
    suite_copy: Path
    suite: Callable[..., object] = field(default=run_suite, repr=False)
    today: dt.date = field(default_factory=lambda: dt.datetime.now(dt.UTC).date())

    @property
    def suite_folder(self) -> Path:
        """The suite that the cells run: a copy that was made when the run began.

        Raises:
            InfrastructureError: somebody has changed the copy.
        """
        if not is_sealed(self.suite_copy, self.plan.inputs["suite"]):
            raise InfrastructureError(
                "The copy of the suite that this run uses was changed.",
                "Find out what writes to the folder of the environments, and run again.",
            )
        return self.suite_copy / self.project.suite.relative_to(self.project.suite_base)


def prepare(
    project: Project,
    cells: Sequence[Cell],
    options: RunOptions,
    lane: Lane,
    host: Mapping[str, str],
    *,
    now: dt.datetime | None = None,
    resumed: RunPlan | None = None,
    suite: Callable[..., object] = run_suite,
) -> Session:
    """Read and check everything before the first cell starts, and create the run's folder.

    Args:
        project: where the files are.
        cells: to judge, as the matrix has them.
        options: how.
        lane: makes the environments.
        host: the caller's environment variables.
        now: start of the run.
        resumed: the plan of an interrupted run to continue; ``cells`` are then its cells.
        suite: runs the suite in one cell.

    Raises:
        UsageError: a file is wrong, or the inputs of the resumed run have changed.
        InfrastructureError: an interpreter is missing, or the folder cannot be written.
    """
    matrix = matrix_of(project)
    inventory, expectations = declared(project)
    if not project.suite.is_dir():
        raise UsageError(f"There is no suite at {project.suite.name}/.", "Name its folder with --suite.")
    suite_copy, suite_digest = sealed_copy(project.suite_base, project.suite_sources, lane.environments / ".suites")
    adapted = lane.adapted(cells)
    known = {cell.id for cell in matrix.cells}
    matrix = matrix.model_copy(update={"cells": (*matrix.cells, *(cell for cell in adapted if cell.id not in known))})
    inputs = {
        "wheel": lane.wheel.sha256,
        "subject": options.subject.digest,
        "package": _digest_of_package(lane.package),
        "suite": suite_digest,
        **digests(project),
    }
    scrubber = scrubber_of(project, lane, host, suite_copy)
    if resumed is not None:
        changed = sorted(name for name, digest in inputs.items() if resumed.inputs.get(name) != digest)
        if changed:
            raise UsageError(
                f"Run {resumed.run_id} cannot be resumed: {', '.join(changed)} changed since it started.",
                "Start a new run, without --resume.",
            )
        plan, folder = resumed, RunFolder(project.reports / resumed.run_id, scrubber)
        folder.keep_alive()
    else:
        started = now or dt.datetime.now(dt.UTC)
        plan = RunPlan(
            run_id=new_run_id(started),
            kind=options.kind,
            started=started.isoformat(timespec="seconds"),
            planned=tuple(cell.id for cell in adapted),
            profile=options.profile,
            inputs=inputs,
            shard=options.shard,
        )
        folder = RunFolder.create(project.reports, plan, scrubber)
    return Session(
        project, options, lane, matrix, inventory, expectations, adapted, folder, plan, host, suite_copy, suite
    )


def _digest_of_package(package: Package | None) -> str:
    """Of another project's package, and of how it is installed; "": there is none."""
    if package is None:
        return ""
    return digest_of_json([package.wheel.sha256, package.extras, package.source is not None])


def scrubber_of(project: Project, lane: Lane, host: Mapping[str, str], suite_copy: Path) -> Scrubber:
    """Takes this machine's paths out of everything that a run writes."""
    roots = {
        "reports": project.reports,
        "suite": suite_copy / project.suite.relative_to(project.suite_base),
        "sources": suite_copy,
        "root": project.root,
        "tmp": Path(tempfile.gettempdir()),
        **lane.roots,
    }
    home = host.get("HOME")
    return Scrubber(roots | ({"home": Path(home)} if home else {}))
