"""``mcore-compat run | merge | plan | inventory | schema``."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcore_compat.cli.executor import (
    WAIT_S,
    ExecutorName,
    NodeCache,
    Placement,
    RayCpus,
    RayGpus,
    RayMemory,
    RayResources,
    RayWait,
    Where,
    choose_executor,
    executor_words,
)
from mcore_compat.cli.options import (
    JOBS,
    CellsDir,
    Classes,
    DataDir,
    Durations,
    Inventory,
    Jobs,
    Profile,
    ReportDir,
    Root,
    Select,
    ShardText,
    SubjectText,
    Suite,
    Workers,
    check_profile,
    console,
    interrupt_on_sigterm,
    planned,
    selection,
    shard_seconds,
    shown,
)
from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.contract.rules.rule import Rule
from mcore_compat.errors import UsageError
from mcore_compat.gate.model import GateReport
from mcore_compat.matrix.cells import MatrixFile
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.matrix.inventory import UNDECLARED, check_of, derive, load_inventory, write_text
from mcore_compat.matrix.inventory import Inventory as InventoryFile
from mcore_compat.matrix.selection import github_matrix, github_shards
from mcore_compat.matrix.toml_file import schema_text, stale_schemas
from mcore_compat.pipeline.collect import collect as collect_checks
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.lanes import IndexLane
from mcore_compat.pipeline.merge import merge as merge_shards
from mcore_compat.pipeline.merge import read_shards
from mcore_compat.pipeline.progress import display_for
from mcore_compat.pipeline.run_folder import RunFolder, newest_unfinished
from mcore_compat.pipeline.session import RunOptions, prepare
from mcore_compat.project import Project
from mcore_compat.report import terminal
from mcore_compat.report.write import write_run
from mcore_compat.results import Report
from mcore_compat.run.suite_facts import read_facts
from mcore_compat.subjects.selection import subject_of
from mcore_compat.verdicts import exit_code

__all__ = ["publish_run", "register"]

_COPIES = (
    "note: uv's cache and the environments are on different filesystems, so every environment is a copy of about 5 GB; "
    "name a folder beside the cache with --cells-dir"
)
# The profiles that verdicts are made with: derandomised, so each run tries the same examples.
_COUNTED_PROFILES = frozenset({"ci", "gpu"})
_ONE_CELL_REUSE = "note: --reuse always re-runs at least one cell as a spot check, so a single cell is never reused"


def register(app: typer.Typer) -> None:
    """Add the commands to ``mcore-compat``."""
    for command in (run, merge, plan, inventory, schema):
        app.command()(command)


def run(
    select: Select = None,
    classes: Classes = False,
    shard: ShardText = None,
    durations: Durations = None,
    jobs: Jobs = JOBS,
    workers: Workers = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the most recent interrupted run.")] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse", help="Reuse passing results whose inputs are unchanged; re-run 10 % of them as a spot check."
        ),
    ] = False,
    profile: Profile = "ci",
    report_dir: ReportDir = None,
    cells_dir: CellsDir = None,
    suite: Suite = None,
    inventory: Inventory = None,
    data: DataDir = None,
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
    """Run the suite in the selected cells and report. Exit code 0 passed, 1 failed, 2 usage, 3 inconclusive."""
    check_profile(profile)
    project = Project.find(root).with_paths(
        data=data, suite=suite, inventory=inventory, cells=cells_dir, reports=report_dir
    )
    chosen = subject_of(project, subject)
    if resume and (select or classes or shard or durations):
        raise UsageError(
            "--resume continues the cells of the interrupted run; "
            "--select, --classes, --shard and --durations do not apply.",
            "Leave them out, or start a new run without --resume.",
        )
    matrix = matrix_of(project)
    unfinished = newest_unfinished(project.reports, "run") if resume else None
    if unfinished is not None:
        if profile not in {"ci", unfinished.profile}:
            raise UsageError(
                f"The interrupted run has profile {unfinished.profile}, not {profile}.",
                "Leave --profile out, or start a new run without --resume.",
            )
        cells, part = tuple(cell for cell in matrix.cells if cell.id in unfinished.planned), unfinished.shard
    else:
        cells, part = planned(project, matrix, selection(select, classes, shard), durations)
    place: Placement = {
        "cpus": ray_cpus, "gpus": ray_gpus, "memory": ray_memory, "resources": ray_resource, "wait_s": ray_wait,
        "node_cache": node_cache,
    }  # fmt: skip
    executor = choose_executor(where, jobs, **place)
    interrupt_on_sigterm()
    screen = console()
    lane = IndexLane.open(project, matrix.requirements, os.environ, chosen)
    options = RunOptions(
        kind="run",
        jobs=jobs,
        profile=unfinished.profile if unfinished is not None else profile,
        workers=workers,
        subject=chosen,
        reuse=reuse,
        again=" ".join(
            [_again(report_dir, cells_dir, suite, inventory, data, subject), *executor_words(where, **place)]
        ),
        shard=part,
    )
    session = prepare(project, cells, options, lane, os.environ, resumed=unfinished)
    if not lane.uv.shares_disk_with(project.cells):
        screen.print(_COPIES, markup=False)
    if reuse and len(cells) == 1:
        screen.print(_ONE_CELL_REUSE, markup=False)
    with display_for(screen, len(session.cells)) as display:
        report = execute(session, display, executor)
    publish_run(project, session.folder, report, screen)
    raise typer.Exit(exit_code(report.verdict))


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Folders of the shards' runs, each with a run.json.")],
    report_dir: ReportDir = None,
    inventory: Inventory = None,
    data: DataDir = None,
    root: Root = None,
) -> None:
    """Merge the shards of one run into one report. Exit code 0 passed, 1 failed, 2 usage, 3 inconclusive."""
    project = Project.find(root).with_paths(data=data, inventory=inventory, reports=report_dir)
    merged = merge_shards(project, read_shards(runs))
    publish_run(merged.project, merged.folder, merged.report, console())
    raise typer.Exit(exit_code(merged.report.verdict))


def publish_run(project: Project, folder: RunFolder, report: Report, screen: Console) -> None:
    """Write the reports of a run, make them the latest, and print its screen."""
    write_run(folder, report, project.known)
    folder.publish()
    screen.print(terminal.render(report))
    screen.print(f"report: {shown(project.reports / 'latest' / 'report.md')}", markup=False, highlight=False)


def _again(
    report_dir: Path | None,
    cells_dir: Path | None,
    suite: Path | None,
    inventory: Path | None,
    data: Path | None,
    subject: str | None,
) -> str:
    """The command that resumes this run: with the options that say where its files are."""
    places = {
        "--report-dir": report_dir,
        "--cells-dir": cells_dir,
        "--suite": suite,
        "--inventory": inventory,
        "--data": data,
        "--subject": subject,
    }
    return " ".join(["mcore-compat run --resume", *(f"{name} {value}" for name, value in places.items() if value)])


def plan(
    select: Select = None,
    classes: Classes = False,
    shard: ShardText = None,
    durations: Durations = None,
    github: Annotated[bool, typer.Option("--github", help="Print the matrix of a GitHub workflow as JSON.")] = False,
    shards: Annotated[
        int | None, typer.Option("--shards", min=1, help="With --github: one job for each of so many shards.")
    ] = None,
    root: Root = None,
) -> None:
    """List the cells that a run would judge."""
    project = Project.find(root)
    if shards is not None and (not github or shard):
        raise UsageError("--shards prints one job for each shard.", "Give it with --github and without --shard.")
    matrix = matrix_of(project)
    cells, _ = planned(project, matrix, selection(select, classes, shard), durations)
    if shards is not None:
        typer.echo(github_shards(cells, shards, shard_seconds(project, durations)))
        return
    if github:
        typer.echo(github_matrix(cells))
        return
    for cell in cells:
        typer.echo(f"{cell.id:28} class {cell.contract_class:24} mode {cell.expected_mode or '-':7} lane {cell.lane}")


def inventory(
    source: Annotated[Path | None, typer.Option("--from", help="A run's folder, or one facts.json.")] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Ask each cell's suite what it would run.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Update the inventory file.")] = False,
    root: Root = None,
) -> None:
    """Generate the list of required checks from a run (or --collect) and print it; --write updates the file."""
    project = Project.find(root)
    target = project.inventory
    matrix = matrix_of(project)
    first = None if subject_of(project, None).is_fused else UNDECLARED  # an ordinary suite counts nothing
    old = load_inventory(target) if target.is_file() else first
    origin = source or project.reports / "latest"
    executed = _collected(project) if collect else _executed(origin)
    launches = None if collect or origin.is_file() else _launches(origin)
    if not executed:
        raise UsageError("No cell of this run has run a check.", "Run the cells first, or use --collect.")
    unseen = [cell.id for cell in matrix.cells if cell.id not in executed]
    if unseen:
        typer.echo(f"note: {len(unseen)} cells were not seen, so bounds may be wrong for them", err=True)
    text = write_text(derive(executed, matrix.cells, old, launches))
    if write:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        typer.echo(f"{target.name}: {text.count('[[check]]')} checks from {len(executed)} cells", err=True)
    else:
        typer.echo(text, nl=False)


def schema(
    check: Annotated[bool, typer.Option("--check", help="Fail if a committed schema is out of date.")] = False,
    root: Root = None,
) -> None:
    """Write the JSON Schemas of the data files and of the reports beside the data."""
    data = Project.find(root).data
    texts = {
        data / "matrix.schema.json": schema_text(MatrixFile),
        data / "inventory.schema.json": schema_text(InventoryFile),
        data / "expectations.schema.json": schema_text(Expectations),
        data / "report.schema.json": schema_text(Report),
        data / "gate.schema.json": schema_text(GateReport),
        data / "rule.schema.json": schema_text(Rule),
    }
    stale = stale_schemas(texts)
    if check and stale:
        raise UsageError(
            f"Out of date: {', '.join(path.name for path in stale)}.", "Run `mcore-compat schema` and commit them."
        )
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        typer.echo(f"wrote {path.name}")


def _collected(project: Project) -> dict[str, dict[str, int]]:
    matrix = matrix_of(project)
    with tempfile.TemporaryDirectory() as scratch:
        subject = subject_of(project, None)
        lane = IndexLane.open(project, matrix.requirements, os.environ, subject)
        options = RunOptions(kind="collect", subject=subject)
        session = prepare(project.with_paths(reports=Path(scratch)), matrix.cells, options, lane, os.environ)
        return collect_checks(session, lambda line: typer.echo(line, err=True))


def _executed(source: Path) -> dict[str, dict[str, int]]:
    if source.is_file():
        facts, problem = read_facts(source.parent)
        if facts is None:
            raise UsageError(f"{problem}.", "Name a run's folder or a suite's facts.json.")
        return {source.parent.name: dict(Counter(check_of(node) for node in facts.collected))}
    return {
        cell.id: {result.check: result.cases for result in cell.results if result.outcome != "skipped"}
        for cell in _report(source).cells
        if cell.results
    }


def _launches(source: Path) -> dict[str, dict[str, int]] | None:
    """How often the fused head ran in each check; None: the run's profile tries more or less than pull requests do."""
    report = _report(source)
    if report.profile not in _COUNTED_PROFILES:
        return None
    return {cell.id: {result.check: result.launches for result in cell.results} for cell in report.cells}


def _report(source: Path) -> Report:
    try:
        return Report.model_validate_json((source / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UsageError(f"{source}/report.json cannot be read.", "Run the cells first, or name --from.") from exc
