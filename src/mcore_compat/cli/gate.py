"""``mcore-compat gate``: may we upgrade to this megatron-core?"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.cli.options import (
    CellsDir,
    DataDir,
    Inventory,
    Jobs,
    Profile,
    ReportDir,
    Root,
    SubjectText,
    Suite,
    Workers,
    check_profile,
    console,
    interrupt_on_sigterm,
    shown,
)
from mcore_compat.errors import UsageError
from mcore_compat.files.scrub import Scrubber
from mcore_compat.gate.run import Judged, run_gate
from mcore_compat.gate.sides import earlier_reports, read_sides, refuse_same
from mcore_compat.gate.steps import index_steps
from mcore_compat.pipeline.progress import display_for
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.pipeline.session import RunOptions
from mcore_compat.project import Project
from mcore_compat.releases import latest, load_releases
from mcore_compat.report import gate_text
from mcore_compat.report.annotations import render_annotations
from mcore_compat.report.write import write_gate
from mcore_compat.subjects.selection import subject_of
from mcore_compat.usage.gate_findings import check_source
from mcore_compat.verdicts import exit_code

__all__ = ["BaselineText", "CandidateText", "Rerun", "publish", "register"]

CandidateText = Annotated[
    str | None,
    typer.Argument(help="megatron-core==X, a wheel, an sdist, a folder, git+file:///repository@ref"),
]
BaselineText = Annotated[
    str | None, typer.Option("--baseline", "-b", help="What to compare with; default: the newest release that passed.")
]
Rerun = Annotated[bool, typer.Option("--rerun/--no-rerun", help="Run both sides again where they differ.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``mcore-compat``."""
    app.command()(gate)


def gate(
    candidate: CandidateText = None,
    baseline: BaselineText = None,
    newest: Annotated[
        bool, typer.Option("--latest", help="Take the newest release on the index as the candidate.")
    ] = False,
    static: Annotated[bool, typer.Option("--static", help="Read the sources only; this alone proves nothing.")] = False,
    rerun: Rerun = True,
    profile: Profile = "ci",
    workers: Workers = 0,
    jobs: Jobs = 2,
    report_dir: ReportDir = None,
    cells_dir: CellsDir = None,
    everything: Annotated[bool, typer.Option("--all", help="Print notes too.")] = False,
    suite: Suite = None,
    inventory: Inventory = None,
    data: DataDir = None,
    subject: SubjectText = None,
    root: Root = None,
) -> None:
    """May we upgrade to this megatron-core? Exit code 0 yes, 1 no, 2 usage, 3 inconclusive."""
    check_profile(profile)
    if newest and candidate is not None:
        raise UsageError(f"Both {candidate} and --latest name a candidate.", "Give one of them.")
    find = Project.readable if static else Project.find
    project = find(root).with_paths(data=data, suite=suite, inventory=inventory, cells=cells_dir, reports=report_dir)
    chosen = subject_of(project, subject)
    if newest:
        candidate = latest(load_releases(project.releases_file), "3.12").version
    if candidate is None:
        raise UsageError("There is no candidate.", "Name one, or give --latest.")
    interrupt_on_sigterm()
    sides = read_sides(project, candidate, baseline, earlier_reports(project, chosen.name))
    refuse_same(sides)
    source = check_source(project, sides.baseline, sides.candidate, dt.datetime.now(dt.UTC).date())
    options = RunOptions(kind="gate", jobs=jobs, profile=profile, workers=workers, subject=chosen)
    steps = () if static else index_steps(project, sides, options, os.environ)
    screen = console()
    judged = run_gate(sides, steps, lambda count: display_for(screen, count), os.environ, rerun=rerun, source=source)
    folder = judged.run.folder if judged.run is not None else _own_folder(project, judged)
    publish(judged, folder, project, everything=everything)
    raise typer.Exit(exit_code(judged.gate.verdict))


def publish(judged: Judged, folder: RunFolder, project: Project, *, everything: bool = False) -> None:
    """Write the gate's reports and print its screen."""
    report = judged.run.report if judged.run is not None else None
    write_gate(folder, judged.gate, report, project.known)
    typer.echo(folder.scrubber.text(gate_text.text(judged.gate, everything=everything)), nl=False)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        typer.echo("\n".join(render_annotations(report, judged.gate)))
    typer.echo(f"report: {folder.scrubber.text(shown(folder.path / 'gate.md'))}")


def _own_folder(project: Project, judged: Judged) -> RunFolder:
    """The folder of a gate that ran no cell."""
    folders = {"reports": project.reports, "cells": project.cells, "root": project.root, "home": Path.home()}
    return RunFolder(project.reports / judged.gate.run_id, Scrubber(folders | {"tmp": Path(tempfile.gettempdir())}))
