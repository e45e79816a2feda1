"""Compiled Python of a cell, kept apart from its sources and sealed between runs.

Python reads bytecode beside a source without looking at the source's content, so bytecode in ``site-packages`` is not
read at all. A cell has a folder of its own for it; what somebody changed there since the last run is thrown away.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

from mcore_compat.files.atomic import write_atomically

__all__ = ["open_bytecode", "seal_bytecode"]


def open_bytecode(folder: Path, home: Path) -> None:
    """Throw the bytecode away unless it is as it was sealed; the seal is broken until the next one.

    Args:
        folder: the cell's folder, for the seal.
        home: the home of its processes, which holds the bytecode.
    """
    seal, bytecode = folder / "bytecode.sha256", home / "bytecode"
    try:
        intact = seal.read_text(encoding="utf-8") == _digest(bytecode)
    except OSError:
        intact = False
    seal.unlink(missing_ok=True)
    if not intact:
        shutil.rmtree(bytecode, ignore_errors=True)


def seal_bytecode(folder: Path, home: Path) -> None:
    """Remember the bytecode as the run has left it."""
    with contextlib.suppress(OSError):
        write_atomically(folder / "bytecode.sha256", _digest(home / "bytecode"))


def _digest(bytecode: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(bytecode.rglob("*.pyc")):
        total.update(f"{path.relative_to(bytecode).as_posix()}\0".encode("utf-8", "surrogateescape"))
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
