"""``mcore-compat uses | check | who-breaks | downstreams``: thin; it reads arguments, calls functions, prints."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.cli.options import Root
from mcore_compat.contract.scan import branches
from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.project import Project
from mcore_compat.releases import load_releases
from mcore_compat.usage.downstreams import assess_all, refresh
from mcore_compat.usage.expectations import apply_expectations, load_usage_expectations
from mcore_compat.usage.extract import extract_uses
from mcore_compat.usage.matrix import assess
from mcore_compat.usage.page import render_usage_page
from mcore_compat.usage.render import (
    breakage_as_json,
    breakage_as_text,
    matrix_as_text,
    report_as_json,
    report_as_sarif,
    report_as_text,
    use_list_line,
    uses_as_json,
    uses_as_text,
)
from mcore_compat.usage.shipped import INDEX_FILE, pack, shipped_versions
from mcore_compat.usage.sources import open_source, patch_files
from mcore_compat.usage.targets import lists_folder, named_megatrons, open_sides
from mcore_compat.usage.upstream import SummaryCache, open_upstream
from mcore_compat.usage.use_lists import load_sources, load_use_lists
from mcore_compat.usage.who_breaks import branch_breaks, commit_of_pull_request, commits_of
from mcore_compat.usage.who_breaks import who_breaks as judge_commits
from mcore_compat.verdicts import ExitCode

__all__ = ["register"]

Source = Annotated[
    str, typer.Argument(help="Folder, .whl, .tar.gz, package==version, or git+file:///repository@ref; default: here.")
]
Include = Annotated[
    list[str] | None, typer.Option("--include", help="Read only this folder of the source; repeatable.")
]


class UsesFormat(StrEnum):
    """How uses are printed."""

    TEXT = "text"
    JSON = "json"


class CheckFormat(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"


def uses(
    source: Source = ".",
    include: Include = None,
    shape: Annotated[UsesFormat, typer.Option("--format", "-f", help="text or json.")] = UsesFormat.TEXT,
) -> None:
    """List everything that a source uses of Megatron, with the guards around it."""
    extracted = extract_uses(open_source(source, include=tuple(include or ())))
    typer.echo(uses_as_text(extracted) if shape is UsesFormat.TEXT else uses_as_json(extracted), nl=False)


def check(
    source: Source = ".",
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            "-a",
            help="Release, range such as 0.16..0.19, wheel, folder or git+file:///clone@ref; repeatable, or commas.",
        ),
    ] = None,
    pin: Annotated[str | None, typer.Option(help="The Megatron that the source is written for.")] = None,
    clone: Annotated[Path | None, typer.Option(help="Clone of Megatron-LM: names the first bad commit.")] = None,
    include: Include = None,
    expectations: Annotated[Path | None, typer.Option(help="TOML file of declared exceptions.")] = None,
    shape: Annotated[CheckFormat, typer.Option("--format", "-f", help="text, json or sarif.")] = CheckFormat.TEXT,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also expected and repeated findings.")] = False,
) -> None:
    """Report which Megatron breaks a source, on which line; exit code 0 fine, 1 findings, 2 usage, 3 not judged."""
    opened = open_source(source, include=tuple(include or ()))
    extracted = extract_uses(opened)
    with open_sides(tuple(against or ()), pin) as sides:
        report = assess(extracted, sides.sides, pin=sides.pin, patches=patch_files(opened))
        if clone is not None:
            report = sides.with_commits(report, extracted, clone)
    if expectations is not None:
        report = apply_expectations(report, load_usage_expectations(expectations), dt.datetime.now(dt.UTC).date())
    text = {
        CheckFormat.TEXT: lambda: report_as_text(report, everything=everything),
        CheckFormat.JSON: lambda: report_as_json(report),
        CheckFormat.SARIF: lambda: report_as_sarif(report),
    }[shape]()
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    raise typer.Exit(ExitCode.GREEN if report.clean else ExitCode.BREAK)


def who_breaks(
    clone: Annotated[Path, typer.Argument(help="Clone of Megatron-LM, bare or checked out.")],
    commit: Annotated[str | None, typer.Option(help="One commit.")] = None,
    pull_request: Annotated[int | None, typer.Option("--pr", help="Merged pull request.")] = None,
    span: Annotated[str | None, typer.Option("--range", help="Commits after A up to B, as A..B.")] = None,
    refs: Annotated[
        list[str] | None, typer.Option("--refs", help="Branches not merged yet, as refs/pull/*/head; repeatable.")
    ] = None,
    onto: Annotated[list[str] | None, typer.Option("--onto", help="Where --refs start from; repeatable.")] = None,
    branch: Annotated[str, typer.Option(help="Branch that --pr is searched on.")] = "HEAD",
    downstream: Annotated[
        list[str] | None, typer.Option("--downstream", "-d", help="Only this one; repeatable.")
    ] = None,
    lists: Annotated[Path | None, typer.Option(help="Folder of use lists; default: those of the project.")] = None,
    shape: Annotated[UsesFormat, typer.Option("--format", "-f", help="text or json.")] = UsesFormat.TEXT,
) -> None:
    """Report which public downstreams upstream commits break, and on which of their lines; exit code 1 if any."""
    if sum(option is not None for option in (commit, pull_request, span, refs)) != 1:
        raise UsageError(
            "Exactly one of --commit, --pr, --range and --refs is needed.", "give --commit SHA, for example."
        )
    known = load_use_lists(lists or lists_folder(), downstream or ())
    cache = SummaryCache()
    try:
        if refs is not None:
            found = branch_breaks(clone, branches(clone, refs, onto or ["main"]), known, cache)
        else:
            if span is not None:
                ends = _ends(span)
            else:
                one = commit if commit is not None else commit_of_pull_request(clone, pull_request or 0, branch)
                ends = (f"{one}^", one)
            found = judge_commits(clone, commits_of(clone, *ends), known, cache)
        broken = 0
        for breakage in found:
            broken += 1
            typer.echo(breakage_as_text(breakage) if shape is UsesFormat.TEXT else breakage_as_json(breakage), nl=False)
    finally:
        cache.close()
    if not broken and shape is UsesFormat.TEXT:
        typer.echo("no downstream is affected")
    raise typer.Exit(ExitCode.BREAK if broken else ExitCode.GREEN)


def _ends(span: str) -> tuple[str, str]:
    start, dots, end = span.partition("..")
    if not dots or not start:
        raise UsageError(f"{span!r} is not a range.", "give it as A..B.")
    return start, end or "HEAD"


def usage_index(
    check_only: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 if a final release has no index.")
    ] = False,
    root: Root = None,
) -> None:
    """Make the indices of all releases, which come with the package, again from the releases' own files."""
    project = Project.find(root)
    releases = load_releases(project.releases_file)
    candidates = named_megatrons((), releases)
    lacking = [one.label for one in candidates if one.version not in shipped_versions()]
    if check_only:
        typer.echo(f"no index: {', '.join(lacking)}" if lacking else f"all {len(candidates)} releases have an index")
        raise typer.Exit(ExitCode.BREAK if lacking else ExitCode.GREEN)
    cache = SummaryCache()
    try:
        data = pack((open_upstream(one, releases) for one in candidates), cache)
    finally:
        cache.close()
    target = project.root / INDEX_FILE
    target.write_bytes(data)
    typer.echo(f"{target.name}: {len(candidates)} releases, {len(data) / 1e6:.1f} MB")


def downstreams(
    refresh_one: Annotated[
        str | None, typer.Option("--refresh", help="Read this downstream again, from --from.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Its clone as git+file:///clone@ref, or a folder.")
    ] = None,
    against: Annotated[list[str] | None, typer.Option("--against", "-a", help="As for check.")] = None,
    clone: Annotated[Path | None, typer.Option(help="Clone of Megatron-LM: names the first bad commits.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the matrix as one HTML page.")] = None,
    lists: Annotated[Path | None, typer.Option(help="Folder of use lists; default: those of the project.")] = None,
) -> None:
    """Show the use lists, refresh one, or check all of them against Megatrons."""
    folder = lists or lists_folder()
    if refresh_one is not None:
        entry = next((one for one in load_sources(folder) if one.name == refresh_one), None)
        if entry is None or source is None:
            raise UsageError(
                f"{refresh_one} cannot be refreshed.", "name an entry of sources.toml, and give its source with --from."
            )
        typer.echo(use_list_line(refresh(folder, entry, source)))
        return
    found = load_use_lists(folder)
    if against is None and page is None:
        for one in found:
            typer.echo(use_list_line(one))
        return
    with open_sides(tuple(against or ())) as sides:
        reports = assess_all(found, sides.sides)
        if clone is not None:
            named = {one.name: one.extracted for one in found}
            reports = tuple(sides.with_commits(report, named[report.source], clone) for report in reports)
    typer.echo(matrix_as_text(reports), nl=False)
    if page is not None:
        write_atomically(page, render_usage_page(reports))


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("uses")(uses)
    app.command("check")(check)
    app.command("who-breaks")(who_breaks)
    app.command("downstreams")(downstreams)
    app.command("usage-index")(usage_index)
