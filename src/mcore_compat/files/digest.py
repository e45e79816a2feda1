"""SHA-256 digests, always as lower-case hexadecimal text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["digest_of_bytes", "digest_of_file", "digest_of_json", "digest_of_text"]


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
