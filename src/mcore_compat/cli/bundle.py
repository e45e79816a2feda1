"""``mcore-compat bundle``: the wheels that a GPU host without a network needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mcore_compat.cli.options import Root, Select, selection
from mcore_compat.errors import UsageError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import plan_cells
from mcore_compat.project import Project
from mcore_compat.provision.bundle import LIMIT_BYTES, fetch_peer, make_bundle, unmet
from mcore_compat.provision.uv import Uv
from mcore_compat.provision.wheelhouse import WheelhouseError
from mcore_compat.subjects.published import PEERS, PEERS_FOLDER

__all__ = ["bundle"]

_MIB = 1 << 20


def bundle(
    select: Select = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the bundle; default: .bundle/.")] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option("--subject", help=f"Carry this published package too: {', '.join(PEERS)}; repeatable."),
    ] = None,
    root: Root = None,
) -> None:
    """Make the offline bundle for GPU hosts. Needs uv and a network."""
    project = Project.find(root)
    unknown = sorted(set(subject or ()) - set(PEERS))
    if unknown:
        raise UsageError(f"There is no published subject `{unknown[0]}`.", f"Choose from: {', '.join(sorted(PEERS))}.")
    folder = out or project.root / ".bundle"
    matrix = load_matrix(project.matrix_file)
    uv = Uv.find(os.environ)
    cells = plan_cells(matrix, selection(select, python=matrix.python))
    house = make_bundle(project.root, folder, cells, matrix.requirements, uv)
    peers = [fetch_peer(folder, PEERS[name], house.python, uv) for name in sorted(set(subject or ()))]
    for group in (house.harness, house.suite):
        missing = unmet(house, group)
        if missing:
            raise WheelhouseError(f"The bundle is not whole: {'; '.join(missing)}.", "Report this; it is a bug.")
    built = sum(wheel.origin == "built" for wheel in house.wheels)
    more = "".join(f"; {PEERS_FOLDER}/{path.name}, {path.stat().st_size / _MIB:.1f} MiB" for path in peers)
    typer.echo(
        f"{folder.name}/: {len(house.cells)} megatron-cores, {len(house.wheels)} wheels ({built} built from source), "
        f"{house.size / _MIB:.1f} MiB{more}"
    )
    if house.size > LIMIT_BYTES:
        raise WheelhouseError(
            f"The bundle is {house.size / _MIB:.1f} MiB, over {LIMIT_BYTES // _MIB}.", "Bundle fewer cells."
        )
