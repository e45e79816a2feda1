"""Environments of a few cells, for a caller that runs something of its own in them: injected faults, witnesses."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from filelock import FileLock

from mcore_compat.errors import InfrastructureError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.project import Project
from mcore_compat.provision.project_wheel import build_wheel
from mcore_compat.provision.uv import Uv
from mcore_compat.provision.uv_environment import provision
from mcore_compat.records import Environment

__all__ = ["ensure_environments"]


def ensure_environments(project: Project, wanted: Collection[str], host: Mapping[str, str]) -> dict[str, Environment]:
    """Create or reuse verified environments for these cells.

    Args:
        project: its matrix says what the cells are, its wheel goes into each.
        wanted: cell ids.
        host: the caller's environment variables.

    Raises:
        UsageError: the matrix is wrong.
        InfrastructureError: uv is missing, or an environment cannot be made.
    """
    matrix = load_matrix(project.matrix_file)
    uv = Uv.find(host)
    project.cells.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(project.root, project.cells / ".subject", uv)
    found = {}
    for cell in (cell for cell in matrix.cells if cell.id in wanted):
        with FileLock(project.cells / f"{cell.id}.lock"):
            made = provision(cell, matrix.requirements, wheel, project.cells, uv, uv.interpreter(cell.python), host)
        if made.environment is None:
            raise InfrastructureError(f"Cell {cell.id}: {made.reason}.", made.next_step)
        found[cell.id] = made.environment
    return found
