"""Commands of contracts, discovery, gate and bisect, put on the one command line."""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcore_compat.cli import contract as contract_cli
from mcore_compat.cli import releases as releases_cli
from mcore_compat.cli.bisect import bisect
from mcore_compat.files.scrub import Scrubber
from mcore_compat.gate.run import GateConfig, run_gate
from mcore_compat.gate.sides import earlier_reports, read_sides, refuse_same
from mcore_compat.matrix.selection import Selection
from mcore_compat.pipeline.progress import display_for
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.pipeline.session import RunConfig
from mcore_compat.releases import latest, load_releases
from mcore_compat.report import gate_text as render
from mcore_compat.report.annotations import render_annotations
from mcore_compat.report.write import write_gate
from mcore_compat.subjects.selection import BUILT_IN, DEFAULT_SUBJECT, choose_subject
from mcore_compat.verdicts import exit_code

__all__ = ["SubjectText", "gate", "register"]

SubjectText = Annotated[
    str, typer.Option("--subject", help=f"What is judged: {', '.join(BUILT_IN)}, file.py:Class or module:Class.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``mcore-compat``."""
    app.add_typer(contract_cli.app, name="contract")
    app.command()(releases_cli.releases)
    app.add_typer(releases_cli.watch, name="watch")
    app.command()(gate)
    app.command()(bisect)


def gate(
    candidate: Annotated[
        str | None,
        typer.Argument(help="megatron-core==X, a wheel, an sdist, a folder, git+file:///repository@ref"),
    ] = None,
    baseline: Annotated[str | None, typer.Option("--baseline", "-b", help="Default: newest green release.")] = None,
    newest: Annotated[bool, typer.Option("--latest", help="The newest release on the index is the candidate.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Read the sources only; proves nothing by itself.")] = False,
    rerun: Annotated[bool, typer.Option(help="Run both sides again where they differ.")] = True,
    profile: Annotated[str, typer.Option(help="Hypothesis profile of the cells.")] = "ci",
    workers: Annotated[int, typer.Option(min=0, help="pytest-xdist workers inside each cell.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Cells side by side.")] = 2,
    report_dir: Annotated[Path | None, typer.Option(help="Where runs are written; default: reports/.")] = None,
    cells_dir: Annotated[Path | None, typer.Option(help="Where environments live; default: .cells/.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print notes too.")] = False,
    subject: SubjectText = DEFAULT_SUBJECT,
    root: Annotated[Path | None, typer.Option("--root", help="The project's root.")] = None,
) -> None:
    """May we upgrade to this megatron-core? Exit code 0 yes, 1 no, 2 usage, 3 could not judge."""
    chosen = choose_subject(subject)
    data = contract_cli.data_folder(root)
    home = data.parent
    if newest:
        candidate = latest(load_releases(data / "releases.json"), "3.12").version
    if candidate is None:
        raise typer.BadParameter("name a candidate, or give --latest")
    reports = (report_dir or home / "reports").absolute()
    config = GateConfig(
        run=RunConfig(
            root=home,
            cells=(cells_dir or home / ".cells").absolute(),
            reports=reports,
            suite=home / "tests" / "compat",
            inventory=data / "inventory.toml",
            selection=Selection(),
            jobs=jobs,
            profile=profile,
            workers=workers,
            subject=chosen,
        ),
        static_only=static,
        rerun=rerun,
    )
    sides = read_sides(home, candidate, baseline, earlier_reports(home, reports, chosen.name))
    refuse_same(sides)
    console = Console()
    judged, report = run_gate(
        config, sides, lambda count: display_for(console, count), os.environ, dt.datetime.now(dt.UTC)
    )
    folder = RunFolder(reports / judged.run_id, _scrubber(config.run))
    write_gate(folder, judged, report, data)
    typer.echo(folder.scrubber.text(render.text(judged, everything=everything)), nl=False)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        typer.echo("\n".join(render_annotations(report, judged)))
    typer.echo(f"report: {judged.run_id}/gate.md")
    raise typer.Exit(exit_code(judged.verdict))


def _scrubber(run: RunConfig) -> Scrubber:
    folders = {"reports": run.reports, "cells": run.cells, "root": run.root, "tmp": Path(tempfile.gettempdir())}
    return Scrubber(folders | {"home": Path.home()})
