"""What comes back from a node: a cell's result, and the files of its folder."""

from __future__ import annotations

import secrets
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.errors import InfrastructureError
from mcore_compat.pipeline.session import Session
from mcore_compat.results import CellResult

__all__ = ["Delivery", "delivered", "receive"]

# Written again on the caller's machine, with the digest of its own plan.
_OWN = frozenset({"result.json", "result.sha256"})


@dataclass(frozen=True)
class Delivery:
    """A judged cell, on its way.

    Attributes:
        result: JSON of the cell's result.
        files: compressed contents by name.
    """

    result: str
    files: Mapping[str, bytes]


def delivered(folder: Path, result: CellResult) -> Delivery:
    """The delivery of a cell that was judged in ``folder``."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _OWN)
    return Delivery(result.model_dump_json(), {path.name: zlib.compress(path.read_bytes(), 1) for path in files})


def receive(session: Session, cell_id: str, delivery: Delivery) -> CellResult:
    """Write a delivery into the run's folder, as a cell that was judged here; returns the result as written.

    Raises:
        InfrastructureError: it is the delivery of another cell, or names a file outside of the cell's folder.
        ReportError: it cannot be written.
    """
    result = CellResult.model_validate_json(delivery.result)
    if result.id != cell_id:
        raise InfrastructureError(f"The result of cell {result.id} came back for cell {cell_id}.", "Run again.")
    folder = session.folder.cell(cell_id)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    fresh.mkdir(parents=True)
    try:
        for name, content in delivery.files.items():
            if Path(name).name != name or name in _OWN:
                raise InfrastructureError(f"Cell {cell_id} came back with a file named {name!r}.", "Run again.")
            (fresh / name).write_bytes(zlib.decompress(content))
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return session.folder.save_result(result)
