"""The two cells of a gate: the baseline's own cell of the matrix, and one for the candidate. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from packaging.version import InvalidVersion, Version

from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import expected_modes
from mcore_compat.contract.snapshots import sorted_names
from mcore_compat.contract.source.candidate import Candidate, CandidateKind
from mcore_compat.errors import UsageError
from mcore_compat.matrix.cells import PREDICTED, Cell, Matrix
from mcore_compat.results import Report

__all__ = ["baseline_version", "candidate_cell", "cell_of_release", "nearest_release"]


def nearest_release(contract: Contract, snapshots: Mapping[str, Contract]) -> str:
    """Release whose contract differs from this one in the fewest items; the newest of equals.

    A candidate's own version is a label that may lie, so whatever needs a version asks for this one instead.
    """

    def distance(name: str) -> int:
        known = snapshots[name]
        return sum(contract.value(i) != known.value(i) for i in contract.items.keys() | known.items.keys())

    return min(reversed(sorted_names(snapshots)), key=distance)


def cell_of_release(matrix: Matrix, version: str) -> Cell | None:
    """The matrix's cell of a release from the index, backports left out."""
    for cell in matrix.cells:
        if cell.source is None and cell.lane == "cpu" and "backport" not in cell.tags:
            try:
                if Version(cell.megatron_core) == Version(version):
                    return cell
            except InvalidVersion:
                continue
    return None


def baseline_version(matrix: Matrix, reports: Iterable[Report], candidate: str | None = None) -> str:
    """Newest release with a green cell in one of the reports, else the newest in the matrix; never the candidate.

    Raises:
        UsageError: the matrix has no release at all.
    """
    green = {result.id for report in reports for result in report.cells if result.verdict.green}
    releases = [
        cell
        for cell in matrix.cells
        if cell.source is None and "backport" not in cell.tags and cell.megatron_core != candidate
    ]
    chosen = [cell for cell in releases if cell.id in green] or releases
    if not chosen:
        raise UsageError("The matrix has no release to compare with.", "Name a baseline with --baseline.")
    return sorted_names(cell.megatron_core for cell in chosen)[-1]


def candidate_cell(candidate: Candidate, contract: Contract, matrix: Matrix, nearest: str) -> Cell:
    """Cell of the candidate: a known release's own, else the nearest release's with another source.

    The nearest release's variables and requirements come along: what it needs, a build of the same surface needs.
    """
    if candidate.kind is CandidateKind.RELEASE and candidate.version is not None:
        known = cell_of_release(matrix, candidate.version)
        if known is not None:
            return known
    near = cell_of_release(matrix, nearest) or matrix.cells[-1]
    released = candidate.kind is CandidateKind.RELEASE
    read: Literal["hook", "legacy"] = "hook" if expected_modes(contract).get("gpt") == "hook" else "legacy"
    mode = None if near.expected_mode is None else read
    return near.model_copy(
        update={
            "id": "candidate",
            "megatron_core": candidate.version if released else nearest,
            "source": None if released else candidate.requirement,
            "contract_class": "candidate",
            "expected_mode": mode,
            "tags": (PREDICTED,),
        }
    )
