"""Patch files of an adopter, hunk by hunk: whether the lines that each expects are still in the upstream file. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mcore_compat.usage.findings import Severity, UsageFinding
from mcore_compat.usage.upstream import UpstreamTree

__all__ = ["Hunk", "check_patches", "hunks_of"]

_TARGET = re.compile(r"^\+\+\+ (?:[ab]/)?(\S+)")
_SOURCE = re.compile(r"^--- (?:[ab]/)?(\S+)")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True)
class Hunk:
    """One hunk.

    Attributes:
        target: upstream path, from ``megatron/`` on.
        line: of the hunk's header in the patch file.
        start: first line in the file that it was made from.
        expected: lines that must be there, in a row.
        creates: the hunk makes a new file.
    """

    target: str
    line: int
    start: int
    expected: tuple[str, ...]
    creates: bool = False


def hunks_of(text: str) -> Iterator[Hunk]:
    """Hunks about files below ``megatron/``."""
    lines = text.splitlines()
    target, creates, index = "", False, 0
    while index < len(lines):
        line = lines[index]
        if source := _SOURCE.match(line):
            creates = source[1] == "/dev/null"
            target = _upstream_path(source[1])
        elif creates and (named := _TARGET.match(line)):
            target = _upstream_path(named[1])
        elif (head := _HUNK.match(line)) and target:
            expected: list[str] = []
            first, left = index, int(head[2] or 1)
            index += 1
            while index < len(lines) and (left > 0 or lines[index][:1] in {"+", "\\"}):
                body = lines[index]
                if body[:1] in {" ", "-", ""}:
                    expected.append(body[1:])
                    left -= 1
                elif body[:1] not in {"+", "\\"}:
                    break
                index += 1
            yield Hunk(target, first + 1, int(head[1]), tuple(expected), creates)
            continue
        index += 1


def _upstream_path(path: str) -> str:
    place = path.find("megatron/")
    return path[place:] if place >= 0 else ""


def check_patches(patches: Iterable[tuple[str, str]], tree: UpstreamTree) -> tuple[UsageFinding, ...]:
    """Findings about the hunks that do not apply; files of packages that the tree does not have are not judged."""
    return tuple(finding for path, text in patches for finding in _of_file(path, text, tree))


def _of_file(path: str, text: str, tree: UpstreamTree) -> Iterator[UsageFinding]:
    texts: dict[str, list[str]] = {}
    packages = {"/".join(name.split("/")[:2]) for name in tree.keys}
    for hunk in hunks_of(text):
        if not hunk.target.endswith(".py") or "/".join(hunk.target.split("/")[:2]) not in packages or hunk.creates:
            continue
        symbol = hunk.target.removesuffix(".py").replace("/", ".")
        if hunk.target not in tree.keys:
            message = f"{hunk.target} does not exist."
            yield UsageFinding(Severity.PATCH_FILE, "patch-without-file", path, hunk.line, symbol, message)
            continue
        if hunk.target not in texts:
            texts[hunk.target] = tree.read(hunk.target).splitlines()
        if not _contains(texts[hunk.target], hunk.expected):
            message = f"the lines that this hunk changes near line {hunk.start} of {hunk.target} are not there."
            yield UsageFinding(Severity.PATCH_FILE, "patch-hunk", path, hunk.line, symbol, message)


def _contains(lines: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether the expected lines follow each other somewhere; blanks at the ends of lines do not count."""
    wanted = [line.rstrip() for line in expected]
    if not wanted:
        return True
    given = [line.rstrip() for line in lines]
    first = wanted[0]
    return any(line == first and given[index : index + len(wanted)] == wanted for index, line in enumerate(given))
