"""``mcore-compat releases``: what there is, what the matrix knows of it, and what an installer would take."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.errors import UsageError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.releases.index import fetch_releases
from mcore_compat.releases.model import Release, latest, load_releases, merge, save_releases, unknown_to

__all__ = ["releases"]


def _data(root: Path | None) -> Path:
    start = (root or Path.cwd()).resolve()
    for folder in (start, *(start.parents if root is None else ())):
        if (folder / "compat_matrix" / "releases.json").is_file():
            return folder / "compat_matrix"
    raise UsageError(
        "No compat_matrix/releases.json was found here.",
        "Run inside a checkout of the project, or name one with --root.",
    )


def releases(
    update: Annotated[bool, typer.Option("--update", help="Ask the index and rewrite releases.json.")] = False,
    newest: Annotated[bool, typer.Option("--latest", help="Print only the newest release.")] = False,
    unknown: Annotated[bool, typer.Option("--unknown", help="Print only those that the matrix lacks.")] = False,
    candidates: Annotated[bool, typer.Option("--pre", help="Count release candidates too.")] = False,
    python: Annotated[str, typer.Option(help="The interpreter that will install it.")] = "3.12",
    as_data: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    root: Annotated[Path | None, typer.Option("--root", help="The project's root.")] = None,
) -> None:
    """List megatron-core's releases; works offline from the committed list unless --update is given."""
    data = _data(root)
    path = data / "releases.json"
    known = load_releases(path)
    if update:
        known, before = merge(known, fetch_releases()), known
        save_releases(path, known)
        fresh = sorted({r.version for r in known} - {r.version for r in before})
        typer.echo(
            f"{path.name}: {len(known)} releases, {len(fresh)} new{': ' if fresh else ''}{', '.join(fresh)}", err=True
        )
    matrix = {cell.megatron_core for cell in load_matrix(data / "matrix.toml").cells if cell.source is None}
    missing = unknown_to(known, matrix, python)
    if newest:
        typer.echo(latest(known, python, candidates=candidates).version)
        return
    if unknown:
        for release in missing:
            typer.echo(release.version)
        return
    floor = min((release.parsed for release in known if release.version in matrix), default=None)
    shown = [r for r in known if (floor is None or r.parsed >= floor) and (candidates or not r.parsed.is_prerelease)]
    if as_data:
        typer.echo(
            json.dumps([asdict(r) | {"in_matrix": r.version in matrix} for r in shown], indent=1, sort_keys=True)
        )
        return
    for release in shown:
        typer.echo(_row(release, matrix, python))
    names = ", ".join(release.version for release in missing)
    typer.echo(f"not in the matrix: {names}" if missing else "the matrix knows every release that it should")


def _row(release: Release, matrix: set[str], python: str) -> str:
    refusal = release.refusal(python)
    if release.version in matrix:
        state = "in the matrix" + (f", though {refusal}" if refusal else "")
    else:
        state = refusal or "not in the matrix"
    wheels = "wheel" if f"cp{python.replace('.', '')}" in release.wheels or "py3" in release.wheels else "sdist only"
    return f"{release.version:10} {release.uploaded or '?':10}  {wheels:10} {state}"
