"""Takes absolute paths out of everything that is written for others. Pure, apart from reading the host's own roots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Scrubber", "absolute_paths"]

# An absolute path of at least two components below one of the usual roots, not preceded by what makes it a part of
# something else (a URL, a relative path, a placeholder).
_ABSOLUTE = re.compile(
    r"(?<![\w.>/:~-])/(?:home|root|tmp|var|usr|opt|mnt|srv|private|data|work|workspace|builds|github|Users)"
    r"(?:/[\w.+@=~-]+)+"
)
_KEPT_PARTS = 2


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
        """The text without absolute paths."""
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
        """Scrub a text file where it lies, line by line, into place in one step."""
        temporary = path.with_name(path.name + ".scrubbed")
        with (
            path.open(encoding="utf-8", errors="replace") as source,
            temporary.open("w", encoding="utf-8") as target,
        ):
            target.writelines(self.text(line) for line in source)
        temporary.replace(path)


def absolute_paths(text: str) -> tuple[str, ...]:
    """The absolute paths that a text still holds."""
    return tuple(match.group() for match in _ABSOLUTE.finditer(text))
