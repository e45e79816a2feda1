"""A matrix from a list of releases: what each needs to be installed is taken from a matrix that has it. Pure."""

from __future__ import annotations

from mcore_compat import versions
from mcore_compat.errors import MatrixError
from mcore_compat.matrix.cells import Cell, Matrix, ReasonedRequirement
from mcore_compat.settings import Releases

__all__ = ["matrix_of_releases"]

_REASON = "the project's settings ask for it in every cell"


def matrix_of_releases(wanted: Releases, known: Matrix) -> Matrix:
    """One cell per release, in the order of ``known``; none of them expects a mode of a fused forward.

    Args:
        wanted: the releases, and what every cell has in common.
        known: a matrix that has a cell of each, with the variables and requirements that the release needs.

    Raises:
        MatrixError: a release is not known, or none is wanted.
    """
    plain = {
        cell.megatron_core: cell
        for cell in reversed(known.cells)
        if cell.source is None and cell.lane == "cpu" and not cell.tags and cell.id == cell.megatron_core
    }
    releases = [cell.megatron_core for cell in known.cells if plain.get(cell.megatron_core) is cell]
    listed = ", ".join(releases)
    if wanted.specifier is not None:
        chosen = [name for name in releases if wanted.specifier.contains(name)]
        if not chosen:
            raise MatrixError(f"No known release matches `{wanted.specifier}`.", f"Known are: {listed}.")
    else:
        asked = {versions.parse(name) for name in wanted.releases}
        chosen = [name for name in releases if versions.parse(name) in asked]
        found = {versions.parse(name) for name in chosen}
        unknown = [name for name in wanted.releases if versions.parse(name) not in found]
        if unknown:
            step = f"Known are: {listed}. For another one write a matrix.toml and name it with `matrix`."
            raise MatrixError(f"megatron-core {unknown[0]} is not a known release.", step)
    python = wanted.python or known.python
    return Matrix(
        python=python, requirements=known.requirements, cells=tuple(_cell(plain[name], wanted) for name in chosen)
    )


def _cell(known: Cell, wanted: Releases) -> Cell:
    own = tuple(ReasonedRequirement(spec=spec, reason=_REASON) for spec in wanted.requirements)
    common = {name: getattr(wanted, name) for name in ("python", "torch", "time_limit_s")}
    changed = known.model_copy(
        update={
            "expected_mode": None,
            "requirements": (*known.requirements, *own),
            **{name: value for name, value in common.items() if value is not None},
        }
    )
    return Cell.model_validate(changed.model_dump())
