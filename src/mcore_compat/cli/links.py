"""Checks that relative links in Markdown files lead to files of the checkout, and to headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["broken_links"]

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def broken_links(root: Path, files: Iterable[Path]) -> tuple[str, ...]:
    """One line for each relative link in ``files`` that leads nowhere below ``root``."""
    found = []
    for file in sorted(files):
        text = _FENCE.sub("", file.read_text(encoding="utf-8"))
        for target in _LINK.findall(text):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, anchor = target.partition("#")
            path = (file.parent / name).resolve() if name else file
            if not path.exists():
                found.append(f"{file.relative_to(root)}: {target} does not exist")
            elif anchor and path.suffix == ".md" and anchor not in _anchors(path):
                found.append(f"{file.relative_to(root)}: {target} names no heading")
    return tuple(found)


def _anchors(path: Path) -> set[str]:
    headings = _HEADING.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
