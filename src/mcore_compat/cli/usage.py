"""``mcore-compat uses | check | who-breaks | downstreams``: thin; it reads arguments, calls functions, prints."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.usage.expectations import apply_expectations, load_usage_expectations
from mcore_compat.usage.extract import extract_uses
from mcore_compat.usage.matrix import assess
from mcore_compat.usage.render import report_as_json, report_as_sarif, report_as_text, uses_as_json, uses_as_text
from mcore_compat.usage.sources import open_source, patch_files
from mcore_compat.usage.targets import open_sides
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


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("uses")(uses)
    app.command("check")(check)
