"""A small project whose environments are made in no time and whose suites pass, and how to run it."""

import contextlib
import datetime as dt
import os
from dataclasses import dataclass, field
from pathlib import Path

import harness_builders as build

from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import Selection, plan_cells
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.run_folder import newest_unfinished
from mcore_compat.pipeline.session import RunOptions, prepare
from mcore_compat.project import Project
from mcore_compat.records import ProjectWheel

NOW = dt.datetime(2026, 11, 30, 10, tzinfo=dt.UTC)
REAL = Path(__file__).parents[3] / "compat_matrix"
SELECTION = Selection(patterns=("0.18.*", "0.19.2"))


class Recorder:
    def __init__(self):
        self.judged = []

    def phase(self, cell_id, phase):
        pass

    def cases(self, cell_id, count):
        pass

    def done(self, result):
        self.judged.append(result.id)


def made(root):
    """Environments that exist, one per cell."""
    return lambda cell: build.provisioned(folder=root / cell.id, version=cell.megatron_core)


@dataclass
class FakeLane:
    """A lane without environments: what each cell gets is the test's to say."""

    project: Project
    provide: object = None
    wheel: ProjectWheel = field(
        default_factory=lambda: ProjectWheel("mcore-compat", "0.1.0", "ab" * 32, None, Path("x.whl"))
    )
    roots: dict = field(default_factory=dict)
    package: object = None

    @property
    def environments(self):
        return self.project.cells

    def adapted(self, cells):
        return tuple(cells)

    def hold(self, cell, cancel, say):
        return contextlib.nullcontext(not cancel.is_set())

    def provision(self, cell):
        return (self.provide or made(self.project.root))(cell)

    def rerun(self, cell, check):
        return f"Run {check} again."

    def host_findings(self):
        return ()


def passing_suite(cell, _environment, _options, out, *_rest):
    out.mkdir(parents=True, exist_ok=True)
    facts = build.suite_facts(cell.megatron_core, mode=cell.expected_mode)
    return build.suite_run(facts=facts)


def project_at(root, **places):
    return Project.at(root).with_paths(suite=places.pop("suite_folder", root / "suite"), **places)


def session(root, *, selection=SELECTION, cells=None, resume=False, suite=passing_suite, provide=None, **changes):
    """A prepared run of the project at ``root``; ``changes`` are places, or options of the run."""
    places = {name: changes.pop(name) for name in ("data", "inventory", "suite_folder") if name in changes}
    project = project_at(root, **places)
    matrix = load_matrix(project.matrix_file)
    resumed = newest_unfinished(project.reports, "run") if resume else None
    if cells is None:
        planned = [cell for cell in matrix.cells if resumed is not None and cell.id in resumed.planned]
        cells = planned or plan_cells(matrix, selection)
    options = RunOptions(**({"jobs": 2} | changes))
    lane = FakeLane(project, provide)
    return prepare(project, cells, options, lane, os.environ, now=NOW, resumed=resumed, suite=suite)


def run(root, **changes):
    recorder = Recorder()
    return execute(session(root, **changes), recorder), recorder
