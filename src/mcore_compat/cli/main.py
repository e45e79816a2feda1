"""The command line: ``mcore-compat run | plan | inventory | schema``. Thin: it reads arguments and prints."""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from mcore_compat.cli import gate as gate_cli
from mcore_compat.cli import usage as usage_cli
from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.contract.rules.rule import Rule
from mcore_compat.errors import McoreCompatError, UsageError
from mcore_compat.gate.model import GateReport
from mcore_compat.matrix.cells import MatrixFile, load_matrix
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.matrix.inventory import Inventory, check_of, derive, load_inventory, write_text
from mcore_compat.matrix.selection import Selection, Shard, github_matrix, plan_cells
from mcore_compat.matrix.toml_file import schema_text, stale_schemas
from mcore_compat.pipeline import collect as collecting
from mcore_compat.pipeline.progress import display_for
from mcore_compat.pipeline.session import RunConfig, default_jobs, execute, prepare
from mcore_compat.report import terminal
from mcore_compat.report.write import write_run
from mcore_compat.results import Report
from mcore_compat.run.suite_facts import read_facts
from mcore_compat.subjects.selection import DEFAULT_SUBJECT, choose_subject
from mcore_compat.verdicts import exit_code

__all__ = ["app", "main"]

_PLAIN_WIDTH = 180
_COPIES = (
    "note: uv's cache and the environments lie on different filesystems, so every environment is a copy of about 5 GB; "
    "name a folder beside the cache with --cells-dir"
)

app = typer.Typer(
    help="Proves a fused-forward implementation on every megatron-core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

gate_cli.register(app)
usage_cli.register(app)

Select = Annotated[list[str] | None, typer.Option("--select", "-s", help="Shell pattern over cell ids; repeatable.")]
Classes = Annotated[bool, typer.Option("--classes", help="One cell of each contract class, and every backport.")]
ShardText = Annotated[str | None, typer.Option("--shard", help="Part i of n, as i/n.")]
Root = Annotated[Path | None, typer.Option("--root", help="The project's root; default: found upwards from here.")]

SubjectText = gate_cli.SubjectText


@app.command()
def run(
    select: Select = None,
    classes: Classes = False,
    shard: ShardText = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Cells side by side.")] = default_jobs(),
    workers: Annotated[int, typer.Option(min=0, help="pytest-xdist workers inside each cell; 0: none.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest interrupted run.")] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse", help="Take green results of earlier runs with the same inputs; a tenth is judged anew."
        ),
    ] = False,
    profile: Annotated[str, typer.Option(help="Hypothesis profile: dev, ci, nightly, gpu.")] = "ci",
    report_dir: Annotated[Path | None, typer.Option(help="Where runs are written; default: reports/.")] = None,
    cells_dir: Annotated[Path | None, typer.Option(help="Where environments live; default: .cells/.")] = None,
    suite: Annotated[Path | None, typer.Option(help="Folder of the property suite; default: tests/compat.")] = None,
    inventory: Annotated[Path | None, typer.Option(help="Default: inventory.toml beside the matrix.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of matrix and expectations; default: compat_matrix.")
    ] = None,
    subject: SubjectText = DEFAULT_SUBJECT,
    root: Root = None,
) -> None:
    """Judge the selected cells and report: exit code 0 green, 1 break, 2 usage, 3 could not judge."""
    chosen = choose_subject(subject)
    home = _root(root)
    folder = (data or home / "compat_matrix").absolute()
    config = RunConfig(
        root=home,
        cells=(cells_dir or home / ".cells").absolute(),
        reports=(report_dir or home / "reports").absolute(),
        suite=(suite or home / "tests" / "compat").absolute(),
        inventory=(inventory or folder / "inventory.toml").absolute(),
        selection=_selection(select, classes, shard),
        jobs=jobs,
        profile=profile,
        workers=workers,
        resume=resume,
        reuse=reuse,
        subject=chosen,
        data=folder,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    console = _console()
    prepared = prepare(config, os.environ, dt.datetime.now(dt.UTC))
    if not prepared.uv.shares_disk_with(config.cells):
        console.print(_COPIES, markup=False)
    with display_for(console, len(prepared.cells)) as display:
        report = execute(prepared, display)
    write_run(prepared.folder, report, home / "compat_matrix")
    prepared.folder.publish()
    console.print(terminal.render(report))
    console.print(f"report: {_shown(config.reports / 'latest' / 'report.md')}", markup=False, highlight=False)
    raise typer.Exit(exit_code(report.verdict))


@app.command()
def plan(
    select: Select = None,
    classes: Classes = False,
    shard: ShardText = None,
    github: Annotated[bool, typer.Option("--github", help="As the matrix of a GitHub workflow, JSON.")] = False,
    root: Root = None,
) -> None:
    """List the cells that a run would judge."""
    matrix = load_classified_matrix(_root(root) / "compat_matrix")
    cells = plan_cells(matrix, _selection(select, classes, shard))
    if github:
        typer.echo(github_matrix(cells))
        return
    for cell in cells:
        typer.echo(f"{cell.id:28} class {cell.contract_class:24} mode {cell.expected_mode:7} lane {cell.lane}")


@app.command()
def inventory(
    source: Annotated[Path | None, typer.Option("--from", help="A run's folder, or one facts.json.")] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Ask each cell's suite what it would run.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Replace inventory.toml.")] = False,
    root: Root = None,
) -> None:
    """Derive the declared checks from a run, or from a collection; prints them, or writes them with --write."""
    home = _root(root)
    target = home / "compat_matrix" / "inventory.toml"
    matrix = load_matrix(home / "compat_matrix" / "matrix.toml")
    old = load_inventory(target) if target.is_file() else None
    executed = _collected(home, target) if collect else _executed(source or home / "reports" / "latest")
    unseen = [cell.id for cell in matrix.cells if cell.id not in executed]
    if unseen:
        typer.echo(f"note: {len(unseen)} cells were not seen, so bounds may be wrong for them", err=True)
    text = write_text(derive(executed, matrix.cells, old))
    if write:
        target.write_text(text, encoding="utf-8")
        typer.echo(f"{target.name}: {text.count('[[check]]')} checks from {len(executed)} cells", err=True)
    else:
        typer.echo(text, nl=False)


@app.command()
def schema(
    check: Annotated[bool, typer.Option("--check", help="Fail where a committed schema is out of date.")] = False,
    root: Root = None,
) -> None:
    """Write the JSON Schemas of the data files and of the report beside the data."""
    data = _root(root) / "compat_matrix"
    texts = {
        data / "matrix.schema.json": schema_text(MatrixFile),
        data / "inventory.schema.json": schema_text(Inventory),
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


def main() -> None:
    """Entry point: errors of the harness end in two lines and their own exit code."""
    try:
        app()
    except McoreCompatError as exc:
        sys.stderr.write(f"error: {exc.problem}\nnext:  {exc.next_step}\n")
        raise SystemExit(exc.exit_code) from None


def _root(given: Path | None) -> Path:
    start = (given or Path.cwd()).resolve()
    for folder in (start, *(start.parents if given is None else ())):
        if (folder / "compat_matrix" / "matrix.toml").is_file():
            return folder
    raise UsageError(
        "No compat_matrix/matrix.toml was found here.", "Run inside a checkout of the project, or name one with --root."
    )


def _selection(select: list[str] | None, classes: bool, shard: str | None) -> Selection:
    patterns = tuple(part for text in select or [] for part in text.split(",") if part)
    return Selection(patterns=patterns, classes=classes, shard=Shard.parse(shard) if shard else None)


def _collected(home: Path, target: Path) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as scratch:
        config = RunConfig(
            root=home,
            cells=home / ".cells",
            reports=Path(scratch),
            suite=home / "tests" / "compat",
            inventory=target,
            selection=Selection(),
            jobs=1,
            profile="ci",
        )
        prepared = prepare(config, os.environ, dt.datetime.now(dt.UTC))
        return collecting.collect(prepared, lambda line: typer.echo(line, err=True))


def _executed(source: Path) -> dict[str, list[str]]:
    if source.is_file():
        facts, problem = read_facts(source.parent)
        if facts is None:
            raise UsageError(f"{problem}.", "Name a run's folder or a suite's facts.json.")
        return {source.parent.name: sorted({check_of(node) for node in facts.collected})}
    try:
        report = Report.model_validate_json((source / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UsageError(f"{source.name}/report.json cannot be read.", "Run the cells first, or name --from.") from exc
    return {
        cell.id: [result.check for result in cell.results if result.outcome != "skipped"]
        for cell in report.cells
        if cell.results
    }


def _console() -> Console:
    """As wide as the terminal; where there is none, wide enough that no reason is lost."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _shown(path: Path) -> str:
    """Relative to here where that is shorter to read."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


if __name__ == "__main__":
    main()
