"""What a project declares of its suite: the required checks, the exceptions, and a digest of each file."""

from __future__ import annotations

from pathlib import Path

from mcore_compat.files.digest import digest_of_file, digest_of_json
from mcore_compat.matrix.expectations import Expectations, load_expectations
from mcore_compat.matrix.inventory import UNDECLARED, Inventory, load_inventory
from mcore_compat.project import Project
from mcore_compat.settings import Releases

__all__ = ["declared", "digests"]


def declared(project: Project) -> tuple[Inventory, Expectations]:
    """The required checks and the exceptions; neither is demanded of another project.

    Raises:
        UsageError: a file is missing or wrong.
    """
    inventory = load_inventory(project.inventory) if project.declares_checks else UNDECLARED
    if not project.declares_exceptions:
        return inventory, Expectations(schema_version=1)
    expectations = load_expectations(project.expectations_file)
    if project.has_own_inventory:
        # The exceptions are those of several suites; those of another suite would all look unused.
        expectations = expectations.about({check.id for check in inventory.check})
    return inventory, expectations


def digests(project: Project) -> dict[str, str]:
    """Digest of the matrix and of what is declared, by name; "" for what is not declared, or not there."""
    listed = project.settings.matrix
    cells = digest_of_json(listed.model_dump(mode="json")) if isinstance(listed, Releases) else None
    return {
        "matrix": cells if cells is not None else _digest(project.matrix_file),
        "inventory": _digest(project.inventory) if project.declares_checks else "",
        "expectations": _digest(project.expectations_file) if project.declares_exceptions else "",
    }


def _digest(path: Path) -> str:
    return digest_of_file(path) if path.is_file() else ""
