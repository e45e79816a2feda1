"""``mcore-compat gpu``: the GPU lane, on a host whose interpreter, torch and triton are taken as they are."""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.cli.executor import (
    WAIT_S,
    ExecutorName,
    NodeCache,
    RayCpus,
    RayGpus,
    RayMemory,
    RayResources,
    RayWait,
    Where,
    choose_executor,
)
from mcore_compat.cli.gate import BaselineText, Rerun, publish
from mcore_compat.cli.options import (
    JOBS,
    Durations,
    Jobs,
    Profile,
    ReportDir,
    Root,
    Select,
    ShardText,
    SubjectText,
    check_profile,
    console,
    interrupt_on_sigterm,
    planned,
    selection,
)
from mcore_compat.cli.run import publish_run
from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.errors import UsageError
from mcore_compat.gate.run import run_gate
from mcore_compat.gate.sides import earlier_reports, read_sides, refuse_same
from mcore_compat.gate.steps import image_steps
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.inventory import derive, load_inventory, write_text
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.lanes import ImageLane
from mcore_compat.pipeline.progress import display_for
from mcore_compat.pipeline.session import RunOptions, prepare
from mcore_compat.project import Project
from mcore_compat.provision.host_image import read_image
from mcore_compat.provision.wheelhouse import Wheelhouse
from mcore_compat.results import Report
from mcore_compat.subjects.selection import DEFAULT_SUBJECT, ChosenSubject, choose_subject
from mcore_compat.usage.gate_findings import check_source
from mcore_compat.verdicts import ExitCode, exit_code

__all__ = ["app", "choose_for_gpu", "fault_caught"]

app = typer.Typer(
    help="The GPU lane, with the host's own Python, torch and triton.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Limit = Annotated[int, typer.Option("--limit", min=1, help="Time limit of one cell's suite in seconds.")]
Bundle = Annotated[Path | None, typer.Option("--bundle", help="The offline bundle; default: .bundle/.")]
Work = Annotated[
    Path | None, typer.Option("--work", help="Where environments are made; default: the system's temporary folder.")
]
Commit = Annotated[str | None, typer.Option("--commit", help="The checkout's commit, for hosts without git.")]


@app.command("run")
def run_lane(
    select: Select = None,
    shard: ShardText = None,
    durations: Durations = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Ranks, one per GPU; above 1 the parallel checks run.")
    ] = 1,
    fault: Annotated[
        str | None, typer.Option("--fault", help="Inject this fault in every cell; every cell must catch it.")
    ] = None,
    write_inventory: Annotated[
        bool, typer.Option("--write-inventory", help="Declare exactly the checks that ran.")
    ] = False,
    jobs: Jobs = JOBS,
    limit: Limit = 420,
    profile: Profile = "gpu",
    report_dir: ReportDir = None,
    work: Work = None,
    commit: Commit = None,
    bundle: Bundle = None,
    subject: SubjectText = None,
    where: Where = ExecutorName.LOCAL,
    ray_cpus: RayCpus = 1.0,
    ray_gpus: RayGpus = None,
    ray_memory: RayMemory = None,
    ray_resource: RayResources = None,
    ray_wait: RayWait = WAIT_S,
    node_cache: NodeCache = None,
    root: Root = None,
) -> None:
    """Run the GPU suite in the selected cells. Exit code 0 passed, 1 failed, 2 usage, 3 inconclusive."""
    given = {"--fault": fault is not None, "--nproc": nproc > 1, "--write-inventory": write_inventory}
    named = subject or DEFAULT_SUBJECT
    chosen = choose_for_gpu(named, [name for name, asked in given.items() if asked])
    check_profile(profile)
    project, house = _opened(root, report_dir, bundle)
    _check_gpus(nproc, named)
    suite = project.gpu_parallel if nproc > 1 else project.gpu
    variables = {"MCORE_COMPAT_FAULT": fault} if fault else {}
    variables |= {"MCORE_COMPAT_NPROC": str(nproc)} if nproc > 1 else {}
    chosen_cells = selection(select, shard=shard, python=house.python)
    cells, part = planned(project, load_classified_matrix(project.data), chosen_cells, durations)
    executor = choose_executor(
        where, jobs, cpus=ray_cpus, gpus=ray_gpus, memory=ray_memory, resources=ray_resource, wait_s=ray_wait,
        node_cache=node_cache,
    )  # fmt: skip
    interrupt_on_sigterm()
    screen = console()
    with tempfile.TemporaryDirectory(prefix="mcore-compat-gpu-", dir=work) as folder:
        lane = ImageLane.open(
            suite, house, Path(folder), _host(), subject=chosen, variables=variables, limit_s=limit, commit=commit
        )
        options = RunOptions(
            kind="gpu", jobs=jobs, profile=profile, subject=chosen, again="the same command", shard=part
        )
        session = prepare(suite, cells, options, lane, _host())
        with display_for(screen, len(session.cells)) as display:
            report = execute(session, display, executor)
    publish_run(suite, session.folder, report, screen)
    if write_inventory:
        _write_inventory(suite.inventory, report, session.cells)
    raise typer.Exit(fault_caught(report) if fault else exit_code(report.verdict))


@app.command("gate")
def gate_lane(
    candidate: Annotated[str, typer.Argument(help="A release of the bundle, or a wheel.")],
    baseline: BaselineText = None,
    rerun: Rerun = True,
    jobs: Jobs = JOBS,
    limit: Limit = 420,
    profile: Profile = "gpu",
    report_dir: ReportDir = None,
    work: Work = None,
    commit: Commit = None,
    bundle: Bundle = None,
    root: Root = None,
) -> None:
    """May we upgrade, by the GPU cells of both sides? Exit code 0 yes, 1 no, 2 usage, 3 inconclusive."""
    check_profile(profile)
    project, house = _opened(root, report_dir, bundle)
    sides = read_sides(project, candidate, baseline, earlier_reports(project))
    refuse_same(sides)
    source = check_source(project, sides.baseline, sides.candidate, dt.datetime.now(dt.UTC).date())
    interrupt_on_sigterm()
    screen = console()
    options = RunOptions(kind="gate", jobs=jobs, profile=profile, again="the same command")
    with tempfile.TemporaryDirectory(prefix="mcore-compat-gpu-", dir=work) as folder:
        steps = image_steps(project, sides, options, house, Path(folder), _host(), limit_s=limit, commit=commit)
        judged = run_gate(sides, steps, lambda count: display_for(screen, count), _host(), rerun=rerun, source=source)
    assert judged.run is not None
    publish(judged, judged.run.folder, project)
    judged.run.folder.publish()
    raise typer.Exit(exit_code(judged.gate.verdict))


def choose_for_gpu(text: str, ours_only: Sequence[str] = ()) -> ChosenSubject:
    """What is judged.

    Args:
        text: as typed.
        ours_only: the options of this call that judge this project's own library only.

    Raises:
        UsageError: there is no such subject, or one of these options does not judge it.
    """
    subject = choose_subject(text, "gpu")
    if ours_only and not subject.is_ours:
        raise UsageError(f"`{ours_only[0]}` judges {DEFAULT_SUBJECT} only.", "Leave --subject out, or this option.")
    return subject


def fault_caught(report: Report) -> ExitCode:
    """Passes only if no cell does: a fault that one cell misses is a hole in the suite."""
    missed = [cell.id for cell in report.cells if cell.verdict.green]
    if missed or not report.cells:
        typer.echo(f"the injected fault was missed by {', '.join(missed) or 'all, since no cell ran'}")
        return ExitCode.BREAK
    typer.echo(f"the injected fault was caught by all {len(report.cells)} cells")
    return ExitCode.GREEN


def _opened(root: Path | None, report_dir: Path | None, bundle: Path | None) -> tuple[Project, Wheelhouse]:
    project = Project.find(root).with_paths(reports=report_dir)
    house = Wheelhouse.read(bundle or project.root / ".bundle")
    house.check_host(platform.machine())
    return project, house


def _check_gpus(nproc: int, subject: str) -> None:
    gpus = len(read_image().gpus)
    if nproc > 1 and 0 < gpus < nproc:
        raise UsageError(
            f"--nproc {nproc} needs a GPU for each rank, this host has {gpus}.",
            "Leave --nproc out, or run on a host with more.",
        )
    if not gpus:
        choose_subject(subject)  # its cells are CPU cells then: a package that needs a GPU is refused


def _host() -> Mapping[str, str]:
    """The caller's environment, without what the bootstrap script added to it."""
    return {
        name: value for name, value in os.environ.items() if name not in {"MCORE_COMPAT_HARNESS_SITE", "PYTHONPATH"}
    }


def _write_inventory(path: Path, report: Report, cells: Sequence[Cell]) -> None:
    executed = {
        cell.id: [result.check for result in cell.results if result.outcome != "skipped"]
        for cell in report.cells
        if cell.results
    }
    path.write_text(write_text(derive(executed, cells, load_inventory(path))), encoding="utf-8")
    sys.stderr.write(f"wrote {path.name}\n")
