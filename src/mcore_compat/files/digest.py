"""SHA-256 digests, always as lower-case hexadecimal text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["CACHES", "digest_of_bytes", "digest_of_file", "digest_of_json", "digest_of_text", "digest_of_tree"]

# Written by running the code of a folder, not part of it.
CACHES = frozenset({"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"})


def digest_of_bytes(data: bytes) -> str:
    """Digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_of_text(text: str) -> str:
    """Digest of a text's UTF-8."""
    return digest_of_bytes(text.encode())


def digest_of_json(value: Any) -> str:
    """Digest of a JSON value; the order of keys makes no difference."""
    return digest_of_text(json.dumps(value, sort_keys=True, separators=(",", ":")))


def digest_of_file(path: Path) -> str:
    """Digest of a file's content, read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_tree(folders: Iterable[Path]) -> str:
    """Digest of the names and contents of all files below the folders; caches do not count.

    Raises:
        OSError: a file cannot be read.
    """
    total = hashlib.sha256()
    for number, folder in enumerate(folders):
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and path.suffix != ".pyc" and not CACHES & set(inside.parts):
                total.update(f"{number}/{inside.as_posix()}\0{digest_of_file(path)}\n".encode())
    return total.hexdigest()
