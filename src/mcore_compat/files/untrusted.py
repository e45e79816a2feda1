"""Files and texts that a cell wrote: they are bounded, and never contain what a terminal or a format obeys."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

__all__ = ["UnusableFileError", "cleaned", "open_regular", "parsed_json", "printable", "read_bounded"]

MESSAGE_LIMIT = 20_000
_DEPTH_LIMIT = 64
# Terminal control sequences: CSI, OSC and the two-character ones.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[@-Z\\^_]"
)
# Control characters but tab and newline, marks that turn the direction of text, line separators, lone surrogates and
# noncharacters: no XML, UTF-8, Markdown or terminal needs them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


class UnusableFileError(OSError):
    """A file is not a regular file, or larger than its limit."""


def printable(text: str, limit: int | None = None) -> str:
    r"""The text as every report format can hold it.

    Terminal sequences are removed, other control characters are written out (``\x00``). Printable text is unchanged.

    Args:
        text: any text, lone surrogates included.
        limit: the number of characters to keep; None: all.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}… {len(text) - limit} more characters"
    if "\x1b" in text or "\x9b" in text or "\x9d" in text:
        text = _SEQUENCE.sub("", text)
    return _UNPRINTABLE.sub(_written_out, text.replace("\r\n", "\n").replace("\r", "\n"))


def cleaned(value: Any, limit: int | None = MESSAGE_LIMIT) -> Any:
    """A JSON-like value with every string, keys included, made printable."""
    if isinstance(value, str):
        return printable(value, limit)
    if isinstance(value, dict):
        return {cleaned(key, limit): cleaned(item, limit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(cleaned(item, limit) for item in value)
    return value


def parsed_json(text: str) -> Any:
    """The JSON value in a text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or holds a number that is none.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _depth_exceeds(value, _DEPTH_LIMIT):
        raise ValueError("nested too deeply")
    return value


def open_regular(path: Path) -> int:
    """A file descriptor for reading a regular file; links are not followed, and a pipe does not block.

    Raises:
        OSError: the file is missing.
        UnusableFileError: it is a link, a folder, a pipe or a device.
    """
    if path.is_symlink():
        raise UnusableFileError(f"{path.name} is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableFileError(f"{path.name} is not a regular file")
    return descriptor


def read_bounded(path: Path, limit: int) -> str:
    """The text of a regular file of at most ``limit`` bytes; bytes that are not UTF-8 are replaced.

    Raises:
        OSError: the file is missing or cannot be read.
        UnusableFileError: it is not a regular file, or it is larger.
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise UnusableFileError(f"{path.name} is larger than {limit} bytes")
    return data.decode("utf-8", errors="replace")


def _written_out(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _depth_exceeds(value: Any, limit: int) -> bool:
    layer: list[Any] = [value]
    for _ in range(limit):
        layer = [
            item
            for container in layer
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not layer:
            return False
    return True
