"""``mcore-compat here``: does the megatron-core of this interpreter work, as it is installed?"""

from __future__ import annotations

import datetime as dt
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.cli.options import Profile, Root, SubjectText, Suite, check_profile, shown
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.errors import UsageError
from mcore_compat.files.scrub import Scrubber
from mcore_compat.gate import here_report as reports
from mcore_compat.gate.here import (
    Here,
    cell_of_here,
    environment_of_here,
    judged_as,
    look_here,
    nearest_to,
    plugin_folder,
)
from mcore_compat.judge.cell import judge_cell
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.matrix.inventory import UNDECLARED
from mcore_compat.pipeline.declared import declared
from mcore_compat.project import FUSED_FORWARD, Project, packaged_data, suite_at
from mcore_compat.records import Provisioned
from mcore_compat.results import CellResult
from mcore_compat.run.suite import SuiteOptions, run_suite
from mcore_compat.subjects.selection import OURS, ChosenSubject, choose_subject, subject_of
from mcore_compat.verdicts import exit_code

__all__ = ["here"]

_OUT = Path("mcore-compat-here.json")


def here(
    python: Annotated[
        Path | None, typer.Option("--python", help="The interpreter that has megatron-core; default: this one.")
    ] = None,
    suite: Suite = None,
    static: Annotated[bool, typer.Option("--static", help="Read the source only; this alone proves nothing.")] = False,
    subject: SubjectText = None,
    tools: Annotated[
        Path | None, typer.Option("--tools", help="Folder of packages for an interpreter without pytest.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The verdict file.")] = _OUT,
    limit: Annotated[int, typer.Option("--limit", min=10, max=7200, help="Time limit of the suite, seconds.")] = 1800,
    profile: Profile = "ci",
    root: Root = None,
) -> None:
    """Judge the megatron-core of this interpreter, without an installer or a network. Exit codes as for run.

    The suite is --suite, else that of the project here, else the one of the fused forward that is in the wheel. Under
    torchrun or srun every rank runs it; the first one writes the verdict of all.
    """
    started, place = time.time(), reports.rank_of(os.environ)
    check_profile(profile)
    reports.part_of(out, place.rank).unlink(missing_ok=True)
    project = _project(root)
    chosen, folder = _suite(project, subject, suite)
    if not folder.is_dir():
        raise UsageError(f"There is no suite at {folder.name}/.", "Name its folder with --suite.")
    if chosen.is_fused and place.size > 1:
        raise UsageError(
            "The suite of the fused forward starts its own ranks.", "Run it in one process, or name another --suite."
        )
    interpreter = Path(sys.executable) if python is None else python.absolute()
    known = project.known if project is not None else packaged_data()
    with tempfile.TemporaryDirectory(prefix="mcore-compat-here-") as work:
        cell = cell_of_here(os.environ, plugin_folder(Path(work, "plugin")), tools, limit)
        Path(work, "cell", "home").mkdir(parents=True)
        seen = look_here(interpreter, cell, Path(work, "cell", "home"), os.environ)
        found = nearest_to(Path(seen.source), load_snapshots(known / "contracts"), load_rules(known / "rules"))
        cell = judged_as(cell, seen, found, fused=chosen.is_fused)
        result = None if static else _judged(interpreter, cell, seen, chosen, folder, profile, Path(work), project)
        report = reports.report_of(seen, found, result, "" if static else folder.name, place, started)
        scrubber = Scrubber(
            {
                "megatron": Path(seen.source), "python": Path(seen.prefix), "suite": folder, "work": Path(work),
                "tmp": Path(tempfile.gettempdir()), "home": Path.home(),
            }
        )  # fmt: skip
        report = reports.HereReport.model_validate(scrubber.data(report.model_dump(mode="json")))
    if place.rank > 0:
        reports.write(report, reports.part_of(out, place.rank))
        raise typer.Exit(exit_code(report.verdict))
    report = reports.joined(report, reports.waiting_for(out, report, limit))
    reports.write(report, out)
    typer.echo(reports.text_of(report), nl=False)
    typer.echo(f"report: {shown(out)}")
    raise typer.Exit(exit_code(report.verdict))


def _project(root: Path | None) -> Project | None:
    """The project at ``root`` or around the working directory; None: there is none."""
    try:
        return Project.find(root)
    except UsageError:
        if root is not None:
            raise
        return None


def _suite(project: Project | None, subject: str | None, suite: Path | None) -> tuple[ChosenSubject, Path]:
    """What is judged, and the folder of the tests that judge it."""
    named = suite is not None and str(suite) == FUSED_FORWARD
    if named or (project is None and suite is None):
        return (choose_subject(subject) if subject is not None else OURS), suite_at(Path.cwd(), FUSED_FORWARD)
    if suite is not None:
        chosen = choose_subject(subject) if subject is not None else ChosenSubject.of_suite(suite.resolve().name)
        return chosen, suite.resolve()
    assert project is not None
    return subject_of(project, subject), project.suite


def _judged(
    interpreter: Path,
    cell: Cell,
    seen: Here,
    chosen: ChosenSubject,
    folder: Path,
    profile: str,
    work: Path,
    project: Project | None,
) -> CellResult:
    """Run the suite in the interpreter and judge what it leaves."""
    environment = environment_of_here(interpreter, seen, work / "cell")
    inventory, expectations = UNDECLARED, Expectations(schema_version=1)
    if chosen.is_ours and not seen.gpus and project is not None and not project.is_adopter:
        # In a checkout the checks of a release on a CPU are declared; what a GPU or an image adds is not.
        inventory, expectations = declared(project)
    options = SuiteOptions(folder, profile, subject=chosen)
    run = run_suite(cell, environment, options, work / "out", os.environ, threading.Event())
    return judge_cell(
        cell,
        Provisioned(0.0, environment),
        run,
        inventory,
        expectations,
        dt.datetime.now(dt.UTC).date(),
        subject=chosen,
        rerun=lambda check: f"Run it again: `{interpreter.name} -m pytest {folder.name}/{check}`.",
    )
