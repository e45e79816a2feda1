"""``mcore-compat releases`` and ``mcore-compat watch``: what there is, what the matrix lacks, what the watch found."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from mcore_compat.matrix.cells import Matrix, load_matrix
from mcore_compat.project import Project
from mcore_compat.releases import watch as upstream_watch
from mcore_compat.releases.index import fetch_releases
from mcore_compat.releases.model import Release, latest, load_releases, merge, save_releases, unknown_to

__all__ = ["releases", "watch"]

Root = Annotated[Path | None, typer.Option("--root", help="The project's root.")]

watch = typer.Typer(help="The weekly upstream watch, step by step.", no_args_is_help=True)


def _released(matrix: Matrix) -> set[str]:
    """Releases from the index that the matrix judges."""
    return {cell.megatron_core for cell in matrix.cells if cell.source is None}


def releases(
    update: Annotated[bool, typer.Option("--update", help="Ask the index and rewrite releases.json.")] = False,
    newest: Annotated[bool, typer.Option("--latest", help="Print only the newest release.")] = False,
    unknown: Annotated[bool, typer.Option("--unknown", help="Print only those that the matrix lacks.")] = False,
    candidates: Annotated[bool, typer.Option("--pre", help="Include release candidates.")] = False,
    python: Annotated[str, typer.Option(help="The interpreter that installs it, e.g. 3.12 or 3.12.1.")] = "3.12",
    as_data: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    root: Root = None,
) -> None:
    """List megatron-core's releases; works offline from the committed list unless --update is given."""
    data = Project.find(root).data if update else Project.readable(root).known
    path = data / "releases.json"
    known = load_releases(path)
    if update:
        known, before = merge(known, fetch_releases()), {release.parsed for release in known}
        save_releases(path, known)
        fresh = [release.version for release in known if release.parsed not in before]
        names = f": {', '.join(fresh)}" if fresh else ""
        typer.echo(f"{path.name}: {len(known)} releases, {len(fresh)} new{names}", err=True)
    judged = _released(load_matrix(data / "matrix.toml"))
    missing = unknown_to(known, judged, python)
    if newest:
        typer.echo(latest(known, python, candidates=candidates).version)
        return
    if unknown:
        for release in missing:
            typer.echo(release.version)
        return
    in_matrix = {release.version for release in known if release.parsed in {Version(name) for name in judged}}
    floor = min((release.parsed for release in known if release.version in in_matrix), default=None)
    shown = [r for r in known if (floor is None or r.parsed >= floor) and (candidates or not r.parsed.is_prerelease)]
    if as_data:
        rows = [asdict(release) | {"in_matrix": release.version in in_matrix} for release in shown]
        typer.echo(json.dumps(rows, indent=1, sort_keys=True))
        return
    for release in shown:
        typer.echo(_row(release, release.version in in_matrix, python))
    names = ", ".join(release.version for release in missing)
    typer.echo(f"Not in the matrix: {names}." if missing else "The matrix is up to date.")


def _row(release: Release, in_matrix: bool, python: str) -> str:
    refusal = release.refusal(python)
    state = "in the matrix" if in_matrix else refusal or "not in the matrix"
    if in_matrix and refusal:
        state += f", although {refusal}"
    interpreter = "cp" + "".join(python.split(".")[:2])
    wheels = "wheel" if interpreter in release.wheels or "py3" in release.wheels else "sdist only"
    return f"{release.version:10} {release.uploaded or '?':10}  {wheels:10} {state}"


@watch.command("candidates")
def watch_candidates(root: Root = None) -> None:
    """Print what to judge, as the matrix of a GitHub workflow: releases that the matrix lacks, and upstream's main."""
    data = Project.find(root).data
    matrix = load_matrix(data / "matrix.toml")
    known = merge(load_releases(data / "releases.json"), fetch_releases())
    missing = unknown_to(known, _released(matrix), matrix.python)
    listed = upstream_watch.candidates([release.version for release in missing])
    typer.echo(upstream_watch.candidates_as_json(listed))


@watch.command("note")
def watch_note(
    name: Annotated[str, typer.Option(help="Name of the candidate.")],
    status: Annotated[int, typer.Option(help="Exit code of the gate.")],
    out: Annotated[Path, typer.Option(help="Folder to write the note to.")],
    root: Root = None,
) -> None:
    """Write down what the gate answered for one candidate."""
    excerpt = upstream_watch.newest_gate_report(Project.find(root).root / "reports")
    upstream_watch.write_note(out, upstream_watch.Note(name, status, excerpt))


@watch.command("body")
def watch_body(
    notes: Annotated[Path, typer.Option(help="Folder with one folder per note.")],
    candidates: Annotated[str, typer.Option(help="What `mcore-compat watch candidates` printed.")],
    run: Annotated[str, typer.Option(help="Address of this run.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
) -> None:
    """Write the body of the one living issue."""
    judged = upstream_watch.candidates_from_json(candidates)
    today = dt.datetime.now(dt.UTC).date()
    out.write_text(upstream_watch.issue_body(judged, upstream_watch.read_notes(notes), run, today), encoding="utf-8")
