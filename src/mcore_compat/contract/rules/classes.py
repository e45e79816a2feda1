"""Equivalence classes of releases: one cell of a class stands for all of it in a pull request.

Two releases are of one class when everything that we replace or are called by, and that a rule above a note looks
at, reads the same in both: those are the places where a patch can break although every call still works. What we
only call or read is left to the newest release of the class, and all releases run nightly. Classes are computed,
never written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.contract.model import Contract, Direction
from mcore_compat.contract.rules.rule import Rule, load_rules
from mcore_compat.contract.snapshots import load_snapshots, sorted_names
from mcore_compat.files.digest import digest_of_json
from mcore_compat.matrix.cells import Cell, Matrix, load_matrix
from mcore_compat.matrix.of_releases import matrix_of_releases
from mcore_compat.project import Project, packaged_data
from mcore_compat.settings import Releases

__all__ = ["ReleaseClass", "class_names", "classified", "equivalence_classes", "load_classified_matrix", "matrix_of"]

_BINDING = {Direction.REPLACE, Direction.CALLED_BY}


@dataclass(frozen=True)
class ReleaseClass:
    """Releases with the same binding surface.

    Attributes:
        digest: of that surface.
        members: versions, oldest first; the last one represents the class.
    """

    digest: str
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        """First and last member's minor version, e.g. ``0.16`` or ``0.13-0.15``."""
        ends = [".".join(member.split(".")[:2]) for member in (self.members[0], self.members[-1])]
        return ends[0] if ends[0] == ends[1] else "-".join(ends)

    @property
    def representative(self) -> str:
        """The newest member."""
        return self.members[-1]


def _digest(contract: Contract, rules: Iterable[Rule]) -> str:
    binding = [rule for rule in rules if rule.direction in _BINDING and rule.level != "info" and not rule.is_change]
    facts = {
        item.id: item.value
        for item in contract.items.values()
        if item.value is not None and any(rule.concerns(item.id) for rule in binding)
    }
    return digest_of_json(facts)


def equivalence_classes(contracts: Mapping[str, Contract], rules: Iterable[Rule]) -> tuple[ReleaseClass, ...]:
    """Group releases by binding surface, oldest class first.

    Args:
        contracts: by version.
        rules: they say which items are binding.
    """
    rules = tuple(rules)
    groups: dict[str, list[str]] = {}
    for name in sorted_names(contracts):
        groups.setdefault(_digest(contracts[name], rules), []).append(name)
    return tuple(ReleaseClass(digest, tuple(members)) for digest, members in groups.items())


def class_names(contracts: Mapping[str, Contract], rules: Iterable[Rule]) -> dict[str, str]:
    """Class name by version, for planning: equal names, one cell."""
    found = equivalence_classes(contracts, rules)
    names = [group.name for group in found]
    return {
        member: group.name if names.count(group.name) == 1 else f"{group.name} ({group.digest[:6]})"
        for group in found
        for member in group.members
    }


def classified(matrix: Matrix, names: Mapping[str, str]) -> Matrix:
    """The matrix with the contract class of each cell filled in.

    Args:
        matrix: as its file says.
        names: class name by release, of the releases whose contract is known.
    """
    cells = tuple(cell.model_copy(update={"contract_class": _class_of(cell, names)}) for cell in matrix.cells)
    return matrix.model_copy(update={"cells": cells})


def load_classified_matrix(data: Path) -> Matrix:
    """Read ``matrix.toml`` and compute each cell's contract class.

    Args:
        data: folder of the matrix. Rules and contracts are read from it, or from the folder above it (a matrix of
            another suite beside the project's own); without any, no two releases are of one class.

    Raises:
        MatrixError: the matrix is missing or not valid.
        UsageError: a rule or a contract is not valid.
    """
    matrix = load_matrix(data / "matrix.toml")
    home = next((folder for folder in (data, data.parent) if (folder / "rules").is_dir()), None)
    names = class_names(load_snapshots(home / "contracts"), load_rules(home / "rules")) if home is not None else {}
    return classified(matrix, names)


def matrix_of(project: Project) -> Matrix:
    """The matrix of a project, from its file or its list of releases, with each cell's contract class.

    Raises:
        MatrixError: the matrix is missing or not valid.
        UsageError: a rule or a contract is not valid.
    """
    if isinstance(project.settings.matrix, Releases):
        matrix = matrix_of_releases(project.settings.matrix, load_matrix(packaged_data() / "matrix.toml"))
    elif not project.is_adopter:
        return load_classified_matrix(project.data)
    else:
        matrix = load_matrix(project.matrix_file)
    return classified(matrix, class_names(load_snapshots(project.contracts), load_rules(project.rules)))


def _class_of(cell: Cell, names: Mapping[str, str]) -> str:
    """The class of the release that a cell is built from, with what the cell changes about it.

    A release without a committed contract is a class of its own, since nothing says what it equals. So is a cell with
    another source: its version is a label only.
    """
    release = names.get(cell.megatron_core, cell.megatron_core)
    tags = [tag for tag in cell.tags if not any(other.startswith(f"{tag}-") for other in cell.tags)]
    changes = [*tags, cell.id] if cell.source is not None else tags
    return " ".join([release, *changes])
