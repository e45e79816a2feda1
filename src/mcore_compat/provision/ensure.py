"""Environments of a few cells, for whoever runs something of their own in them: planted faults, witnesses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from filelock import FileLock

from mcore_compat.errors import InfrastructureError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.provision.project_wheel import build_subject
from mcore_compat.provision.uv import Uv
from mcore_compat.provision.uv_environment import provision
from mcore_compat.records import Environment

__all__ = ["provided"]


def provided(root: Path, wanted: Collection[str], cells: Path, host: Mapping[str, str]) -> dict[str, Environment]:
    """The environments of these cells, made or reused, and proved.

    Args:
        root: the project's root; its matrix says what the cells are, its wheel goes into each.
        wanted: cell ids.
        cells: where environments live.
        host: the caller's environment.

    Raises:
        UsageError: the matrix is wrong.
        InfrastructureError: uv is missing, or one of them cannot be made.
    """
    matrix = load_matrix(root / "compat_matrix" / "matrix.toml")
    uv = Uv.find(host)
    cells.mkdir(parents=True, exist_ok=True)
    subject = build_subject(root, cells / ".subject", uv)
    found = {}
    for cell in (cell for cell in matrix.cells if cell.id in wanted):
        with FileLock(cells / f"{cell.id}.lock"):
            made = provision(cell, matrix.requirements, subject, cells, uv, uv.interpreter(cell.python), host)
        if made.environment is None:
            raise InfrastructureError(f"cell {cell.id}: {made.reason}", made.next_step)
        found[cell.id] = made.environment
    return found
