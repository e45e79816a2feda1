"""The committed contracts: one JSON file a release in ``compat_matrix/contracts/``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mcore_compat.contract.model import Contract
from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically

__all__ = ["NoSnapshotError", "load_snapshot", "load_snapshots", "save_snapshot", "snapshot_path", "sorted_names"]


class NoSnapshotError(UsageError):
    """There is no committed contract of that name."""


def snapshot_path(folder: Path, name: str) -> Path:
    """File of a release's snapshot; the name must be a plain version, so it cannot lead elsewhere.

    Raises:
        NoSnapshotError: the name is not a version.
    """
    try:
        return folder / f"{Version(name)}.json"
    except InvalidVersion as error:
        raise NoSnapshotError(f"{name!r} is not a version.", "name a release such as 0.18.2.") from error


def save_snapshot(folder: Path, contract: Contract) -> Path:
    """Write one snapshot, whole or not at all."""
    path = snapshot_path(folder, contract.name)
    write_atomically(path, contract.to_json())
    return path


def load_snapshot(folder: Path, name: str) -> Contract:
    """Read one snapshot.

    Raises:
        NoSnapshotError: there is none of that name.
        ContractFormatError: the file is damaged or of another schema version.
    """
    path = snapshot_path(folder, name)
    if not path.is_file():
        known = ", ".join(sorted_names(path.stem for path in folder.glob("*.json"))) or "none"
        raise NoSnapshotError(f"there is no committed contract of {name} (there are: {known}).", "name one of these.")
    return Contract.from_json(path.read_text(encoding="utf-8"), path.name)


def load_snapshots(folder: Path) -> Mapping[str, Contract]:
    """All snapshots by version, oldest first."""
    names = sorted_names(path.stem for path in folder.glob("*.json"))
    return {name: load_snapshot(folder, name) for name in names}


def sorted_names(names: Iterable[str]) -> list[str]:
    """Versions in order; names that are no versions after them, by text."""

    def key(name: str) -> tuple[bool, Version, str]:
        try:
            return (False, Version(name), name)
        except InvalidVersion:
            return (True, Version("0"), name)

    return sorted(names, key=key)
