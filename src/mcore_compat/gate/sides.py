"""Both megatron-cores of a gate, read: contracts, what the rules say, and the two cells. Nothing of them is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.contract.rules.compare import Finding, compare_contracts
from mcore_compat.contract.rules.rule import Rule, load_rules
from mcore_compat.contract.snapshots import load_snapshots, snapshot_path
from mcore_compat.contract.source.candidate import Candidate, CandidateKind, open_candidate, parse_candidate
from mcore_compat.errors import UsageError
from mcore_compat.gate.cells import baseline_version, candidate_cell, nearest_release
from mcore_compat.matrix.cells import Cell, Matrix
from mcore_compat.project import Project
from mcore_compat.releases import load_releases
from mcore_compat.results import Report
from mcore_compat.subjects.selection import DEFAULT_SUBJECT

__all__ = ["Sides", "earlier_reports", "known_reports", "paired_cells", "read_sides", "refuse_same", "static_findings"]


@dataclass(frozen=True)
class Sides:
    """Both megatron-cores, read.

    Attributes:
        withdrawn: yanked releases, each with the index's reason.
    """

    matrix: Matrix
    rules: tuple[Rule, ...]
    snapshots: Mapping[str, Contract]
    baseline: Candidate
    candidate: Candidate
    old: Contract
    new: Contract
    withdrawn: Mapping[str, str] = field(default_factory=dict)

    @property
    def nearest(self) -> str:
        """Release that the candidate's surface is nearest to; a known release is itself, whichever else is equal."""
        itself = next((name for name, known in self.snapshots.items() if known is self.new), None)
        return itself or nearest_release(self.new, self.snapshots)


def read_sides(project: Project, candidate: str, baseline: str | None, reports: tuple[Report, ...]) -> Sides:
    """Read both sources; nothing of them is run.

    Raises:
        UsageError: one of them cannot be read, or is not megatron-core.
    """
    matrix = matrix_of(project)
    # The rules say what concerns a fused forward; another project is judged by its own suite.
    rules = () if project.is_adopter and project.settings.subject is None else load_rules(project.rules)
    snapshots = load_snapshots(project.contracts)
    releases = load_releases(project.releases_file)

    def contract_of(side: Candidate) -> Contract:
        if side.kind is CandidateKind.RELEASE and side.version is not None:
            path = snapshot_path(project.contracts, side.version)
            if path.is_file():
                return snapshots[path.stem]
        return extract(open_candidate(side, releases), side.label)

    asked = parse_candidate(candidate)
    compared = parse_candidate(baseline or baseline_version(matrix, reports, asked.version))
    withdrawn = {r.version: f"yanked: {r.yanked or 'no reason given'}" for r in releases if r.yanked is not None}
    return Sides(matrix, rules, snapshots, compared, asked, contract_of(compared), contract_of(asked), withdrawn)


def static_findings(sides: Sides) -> tuple[Finding, ...]:
    """What the rules say of the two contracts."""
    return compare_contracts(sides.old, sides.new, sides.rules)


def paired_cells(sides: Sides) -> tuple[Cell, Cell]:
    """The baseline's cell and the candidate's."""
    before = candidate_cell(sides.baseline, sides.old, sides.matrix, nearest_release(sides.old, sides.snapshots))
    if before.id == "candidate":
        before = before.model_copy(update={"id": "baseline"})
    return before, candidate_cell(sides.candidate, sides.new, sides.matrix, sides.nearest)


def known_reports(folders: tuple[Path, ...], judged: str = DEFAULT_SUBJECT) -> tuple[Report, ...]:
    """Reports of earlier runs of this subject that can be read; one of another schema version is passed over."""
    found = []
    for folder in folders:
        path = folder / "report.json"
        if path.is_file():
            try:
                found.append(Report.model_validate_json(path.read_text(encoding="utf-8")))
            except ValueError:
                continue
    return tuple(report for report in found if report.subject.judged == judged)


def earlier_reports(project: Project, judged: str = DEFAULT_SUBJECT) -> tuple[Report, ...]:
    """Reports that may name the baseline: of the latest run, and those that the project keeps."""
    return known_reports(project.kept_results, judged)


def refuse_same(sides: Sides) -> None:
    """A candidate compared with itself proves nothing.

    Raises:
        UsageError: both sides are the same release.
    """
    same_release = sides.baseline.version is not None and sides.baseline.version == sides.candidate.version
    if same_release:
        raise UsageError(
            f"Baseline and candidate are both megatron-core {sides.candidate.version}.", "Name another --baseline."
        )
