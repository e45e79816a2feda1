"""Takes absolute paths, users and tokens in URLs, and control characters out of what is written for others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mcore_compat.files.untrusted import UnusableFileError, open_regular, printable

__all__ = ["Scrubber", "absolute_paths"]

# An absolute path of at least two components below one of the usual roots, not preceded by what makes it a part of
# something else (a URL, a relative path, a placeholder).
_ABSOLUTE = re.compile(
    r"(?<![\w.>/:~-])/(?:home|root|tmp|var|usr|opt|mnt|srv|private|data|work|workspace|builds|github|Users)"
    r"(?:/[\w.+@=~-]+)+"
)
# Who logs in, in a URL; `git` is the account that everybody has on a git host.
_USER = re.compile(r"(?<=://)(?!git@)[^/\s@'\"<>]+@")
_KEPT_PARTS = 2
FILE_LIMIT = 64 << 20
_LINE_LIMIT = 1 << 20


class Scrubber:
    """Replaces known roots by names, and what is left of absolute paths by their last parts."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        """Names by root.

        Args:
            roots: placeholder (without brackets) to folder; longer folders are replaced first.
        """
        pairs = {(str(path), f"<{name}>") for name, path in roots.items()}
        pairs |= {(str(path.resolve()), f"<{name}>") for name, path in roots.items()}
        self._pairs = sorted((pair for pair in pairs if len(pair[0]) > 1), key=lambda pair: -len(pair[0]))

    def text(self, text: str) -> str:
        """The text without absolute paths, user names and tokens in URLs, and control characters."""
        text = _USER.sub("<…>@", printable(text))
        for folder, name in self._pairs:
            text = text.replace(folder, name)
        return _ABSOLUTE.sub(lambda match: "<…>/" + "/".join(match.group().split("/")[-_KEPT_PARTS:]), text)

    def data(self, value: Any) -> Any:
        """The same JSON-like value with every string scrubbed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return value

    def file(self, path: Path) -> None:
        """Scrub a text file in place, line by line; what is not a regular file is replaced by a line that says so.

        A file above the limit is cut, with a last line that counts what was left out.
        """
        temporary = path.with_name(path.name + ".scrubbed")
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as target:
            try:
                source = os.fdopen(open_regular(path), encoding="utf-8", errors="replace")
            except UnusableFileError as exc:
                target.write(f"removed: {exc}\n")
            else:
                with source:
                    self._copy(source, target)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        temporary.replace(path)

    def _copy(self, source: TextIO, target: TextIO) -> None:
        room = FILE_LIMIT
        # A line without an end is read in pieces.
        while room > 0 and (line := source.readline(_LINE_LIMIT)):
            room -= len(line)
            target.write(self.text(line))
        rest = sum(len(piece) for piece in iter(lambda: source.read(_LINE_LIMIT), ""))
        if rest:
            target.write(f"\n… {rest} more characters\n")


def absolute_paths(text: str) -> tuple[str, ...]:
    """The absolute paths that a text still holds."""
    return tuple(match.group() for match in _ABSOLUTE.finditer(text))
