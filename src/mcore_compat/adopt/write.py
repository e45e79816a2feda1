"""Writes generated files, and never over what somebody edited: each carries the digest of its own text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.files.digest import digest_of_bytes

__all__ = ["Outcome", "Written", "write_files"]

_MARK = "# Written by mcore-compat init"
_HEADER = re.compile(rf"{_MARK}; sha256 of the rest: ([0-9a-f]{{64}})\n")


class Outcome(StrEnum):
    """What became of one file."""

    WRITTEN = "written"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    KEPT = "kept"


@dataclass(frozen=True)
class Written:
    """One file, relative to the project's root, and what became of it."""

    path: str
    outcome: Outcome


def write_files(root: Path, texts: Mapping[str, str]) -> tuple[Written, ...]:
    """Write each text below ``root`` with a header; a file that was edited, or is not generated, stays.

    Raises:
        UsageError: a path leads out of ``root``, or to something that is not a file.
    """
    for path in texts:
        place = root / path
        if not place.resolve().is_relative_to(root.resolve()):
            raise UsageError(f"{path} leads out of the project.", "Give `suite` as a folder of the project.")
        if place.exists() and not place.is_file():
            raise UsageError(f"{path} is not a file.", "Move it away.")
    return tuple(Written(path, _write(root / path, text)) for path, text in texts.items())


def _write(path: Path, text: str) -> Outcome:
    content = f"{_MARK}; sha256 of the rest: {digest_of_bytes(text.encode())}\n{text}"
    if not path.exists():
        write_atomically(path, content)
        return Outcome.WRITTEN
    present = path.read_text(encoding="utf-8", errors="replace")
    if present == content:
        return Outcome.UNCHANGED
    if not _is_unedited(present):
        return Outcome.KEPT
    write_atomically(path, content)
    return Outcome.UPDATED


def _is_unedited(present: str) -> bool:
    """Whether a file is as it was generated, by this version or another."""
    header = _HEADER.match(present)
    return header is not None and digest_of_bytes(present[header.end() :].encode()) == header[1]
