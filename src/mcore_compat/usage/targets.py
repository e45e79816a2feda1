"""The Megatrons that a caller names: releases, ranges of them, files, folders and commits, opened for a check."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mcore_compat.contract.source.candidate import Candidate, CandidateKind, NoSuchCandidateError, parse_candidate
from mcore_compat.errors import UsageError
from mcore_compat.project import Project
from mcore_compat.releases import Release, load_releases
from mcore_compat.usage.bisect import with_first_commits
from mcore_compat.usage.check import Side
from mcore_compat.usage.extract import Extracted
from mcore_compat.usage.matrix import UsageReport
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.shipped import shipped_tree
from mcore_compat.usage.upstream import SummaryCache, UpstreamTree, open_upstream

__all__ = ["OpenedSides", "known_releases", "lists_folder", "named_megatrons", "open_sides", "open_tree"]

_RANGE = re.compile(r"(?P<low>[\w.]*)\.\.(?P<high>[\w.]*)")
_OLDEST = "0.12"


@dataclass(frozen=True)
class OpenedSides:
    """Megatrons, oldest first, with the label of the one that the source is written for."""

    sides: tuple[Side, ...]
    pin: str | None
    cache: SummaryCache

    def with_commits(self, report: UsageReport, extracted: Extracted, clone: Path) -> UsageReport:
        """The report with the first bad commit of each finding that has a good and a bad release."""
        return with_first_commits(report, extracted, clone, self.cache)


def known_releases() -> tuple[Release, ...]:
    """Releases of the committed list: of the checkout around the working directory, else the one in the package."""
    return load_releases(_data_file("releases.json"))


def lists_folder() -> Path:
    """The folder of use lists, found as the list of releases is."""
    return _data_file("downstreams")


def _data_file(name: str) -> Path:
    path = Project.readable().known / name
    if not path.exists():
        raise UsageError(f"{name} is missing in {path.parent}.", "Restore it, or run in another folder.")
    return path


def named_megatrons(texts: Sequence[str], releases: Sequence[Release]) -> list[Candidate]:
    """What the caller named, in the order given; ranges become their final releases, oldest first.

    Raises:
        UsageError: a range without releases, or a name that means nothing.
    """
    parts = [part for text in texts for part in text.split(",") if part] or [f"{_OLDEST}.."]
    found: list[Candidate] = []
    for part in parts:
        span = _RANGE.fullmatch(part)
        if span is None:
            found += [_single(part, releases)]
            continue
        inside = [
            r.version for r in releases if not r.parsed.is_prerelease and _within(r.parsed, span["low"], span["high"])
        ]
        if not inside:
            raise UsageError(f"No release is in {part!r}.", "give a range such as 0.16..0.19.")
        found += [parse_candidate(version) for version in inside]
    return list({candidate.label: candidate for candidate in found}.values())


def _single(text: str, releases: Sequence[Release]) -> Candidate:
    """A minor version such as ``0.18`` names its newest release."""
    if re.fullmatch(r"\d+\.\d+", text):
        fitting = [r for r in releases if r.version.startswith(f"{text}.") and not r.parsed.is_prerelease]
        if fitting:
            return parse_candidate(max(fitting, key=lambda r: r.parsed).version)
    return parse_candidate(text)


def _within(version: Version, low: str, high: str) -> bool:
    try:
        above = not low or version >= Version(low)
        # ``..0.19`` includes every 0.19.x.
        below = (
            not high
            or version <= Version(high)
            or version.release[: len(Version(high).release)] == Version(high).release
        )
    except InvalidVersion as error:
        raise NoSuchCandidateError(f"{low}..{high} is not a range of releases.", "give 0.16..0.19.") from error
    return above and below


def open_tree(candidate: Candidate, releases: tuple[Release, ...], cache: SummaryCache) -> UpstreamTree:
    """A release's tree from the shipped index where it has it, else what the candidate names."""
    if candidate.kind is CandidateKind.RELEASE and candidate.version is not None:
        found = shipped_tree(candidate.version, cache)
        if found is not None:
            # The index has no text, which only patch files need: then the release's own file is read.
            whole = functools.cache(lambda: open_upstream(candidate, releases))
            return replace(found, read=lambda path: whole().read(path))
    return open_upstream(candidate, releases)


@contextlib.contextmanager
def open_sides(
    texts: Sequence[str], pin: str | None = None, cache: SummaryCache | None = None
) -> Iterator[OpenedSides]:
    """Open every named Megatron; releases come first, in their order.

    Args:
        texts: what the caller typed; all releases since 0.12 where empty.
        pin: the one that the source is written for; it is added where it is not among them.
        cache: of summaries.
    """
    releases = known_releases()
    candidates = named_megatrons(texts, releases)
    pinned = None
    if pin is not None:
        pinned = _single(pin, releases)
        if pinned.label not in {candidate.label for candidate in candidates}:
            candidates = [pinned, *candidates]
    dated = [c for c in candidates if c.kind is CandidateKind.RELEASE]
    dated.sort(key=lambda candidate: Version(candidate.version or "0"))
    others = [c for c in candidates if c.kind is not CandidateKind.RELEASE]
    if pinned in others:  # a pin that is not a release is the oldest: it is what the rest is compared with
        others.remove(pinned)
        dated.insert(0, pinned)
    store = cache or SummaryCache()
    try:
        sides = tuple(
            Side.of(Resolver(open_tree(candidate, releases, store), store), candidate.label)
            for candidate in (*dated, *others)
        )
        yield OpenedSides(sides, pinned.label if pinned else None, store)
    finally:
        store.close()
