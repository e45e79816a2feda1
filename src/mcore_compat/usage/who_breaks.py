"""Whom an upstream commit breaks: every use list judged before and after it, only where the commit touches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_compat.contract.source.git import GitError, git, resolve_commit
from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.matrix import suggestions
from mcore_compat.usage.model import GuardKind, Use
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.upstream import SummaryCache, UpstreamTree, git_tree
from mcore_compat.usage.use_lists import UseList

__all__ = ["Breakage", "commit_of_pull_request", "commits_of", "who_breaks"]


@dataclass(frozen=True)
class Breakage:
    """What one commit does to one downstream.

    Attributes:
        commit: full id.
        title: short id, date and subject.
        downstream: its name.
        findings: new with the commit.
    """

    commit: str
    title: str
    downstream: str
    findings: tuple[UsageFinding, ...]


@dataclass(frozen=True)
class _Change:
    commit: str
    title: str
    blobs: Mapping[str, str | None]


def commit_of_pull_request(clone: Path, number: int, branch: str = "HEAD") -> str:
    """The commit that merged a pull request: upstream squashes, and names the number in the subject.

    Raises:
        GitError: the branch has no such commit.
    """
    listed = git(clone, ["log", "--first-parent", "--format=%H %s", "--fixed-strings", f"--grep=(#{number})", branch])
    for line in listed.decode(errors="replace").splitlines():
        commit, _, subject = line.partition(" ")
        if f"(#{number})" in subject:
            return commit
    raise GitError(f"{branch} has no commit that names (#{number}).", "fetch it, or give its commit with --commit.")


def commits_of(clone: Path, start: str, end: str) -> list[_Change]:
    """Commits after ``start`` up to ``end`` along first parents, oldest first, with the files that each changes.

    Raises:
        GitError: an end is not in the clone.
    """
    first, last = resolve_commit(clone, start), resolve_commit(clone, end)
    arguments = ["log", "--first-parent", "-m", "--reverse", "--raw", "--no-abbrev", "--no-renames", "-z"]
    listed = git(clone, [*arguments, "--format=%x01%H %cs %s", f"{first}..{last}", "--", "megatron"])
    changes = []
    for part in listed.decode(errors="replace").split("\x01")[1:]:
        fields = [text.strip("\n") for text in part.split("\0")]
        commit, _, about = fields[0].partition(" ")
        blobs: dict[str, str | None] = {}
        rows = [text for text in fields[1:] if text]
        for head, path in zip(rows[::2], rows[1::2], strict=False):
            words = head.lstrip(":").split()
            if path.endswith(".py"):
                blobs[path] = None if words[4].startswith("D") else words[3]
        changes.append(_Change(commit, f"{commit[:10]} {about}", blobs))
    return changes


class _Watched:
    """Uses of all lists, and which files each symbol's answer depends on in the tree at hand."""

    def __init__(self, lists: Sequence[UseList]) -> None:
        self.lists = lists
        self.symbols = sorted({symbol for one in lists for use in one.extracted.uses for symbol in _symbols(use)})
        self.files: dict[str, frozenset[str]] = {}

    def update(self, resolver: Resolver, symbols: Sequence[str]) -> None:
        for symbol in symbols:
            self.files[symbol] = resolver.files_behind(symbol)

    def affected(self, changed: frozenset[str]) -> frozenset[str]:
        return frozenset(symbol for symbol, files in self.files.items() if files & changed)


def _symbols(use: Use) -> Iterator[str]:
    yield use.symbol
    yield from use.alternatives
    for guard in use.guards:
        yield from guard.symbols


def who_breaks(
    clone: Path,
    changes: Sequence[_Change],
    lists: Sequence[UseList],
    cache: SummaryCache,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Breakage]:
    """Judge commits one after the other, which must follow each other along first parents.

    Args:
        clone: of Megatron-LM.
        changes: of :func:`commits_of`.
        lists: of the downstreams.
        cache: of summaries.
        progress: called with the title of each commit.
    """
    if not changes:
        return
    before = git_tree(clone, f"{changes[0].commit}^")
    watched = _Watched(lists)
    watched.update(Resolver(before, cache), watched.symbols)
    for change in changes:
        progress(change.title)
        after = _with(before, change)
        affected = watched.affected(frozenset(change.blobs))
        if affected:
            sides = Side.of(Resolver(before, cache)), Side.of(Resolver(after, cache))
            yield from _judged(change, lists, affected, *sides)
            watched.update(sides[1].resolver, sorted(affected))
        before = after


def _with(tree: UpstreamTree, change: _Change) -> UpstreamTree:
    keys = dict(tree.keys)
    for path, blob in change.blobs.items():
        if blob is None:
            keys.pop(path, None)
        else:
            keys[path] = blob
    return replace(tree, keys=keys, label=change.commit[:12], commit=change.commit, read=tree.reader(keys))


def _judged(
    change: _Change, lists: Sequence[UseList], affected: frozenset[str], before: Side, after: Side
) -> Iterator[Breakage]:
    for one in lists:
        uses = [use for use in one.extracted.uses if affected.intersection(_symbols(use))]
        handlers = {s for use in uses for s in _symbols(use)}
        uses += [
            use
            for use in one.extracted.uses
            if use not in uses
            and any(g.kind is GuardKind.HANDLER and handlers.intersection(g.symbols) for g in use.guards)
        ]
        if not uses:
            continue
        old = {finding.key for finding in check_uses(uses, before)}
        new = [finding for finding in check_uses(uses, after, before) if finding.key not in old]
        if new:
            found = tuple(
                replace(
                    finding,
                    against=change.commit[:12],
                    commit=change.title,
                    replacement=suggestions(finding.symbol, after.resolver, before.resolver),
                )
                for finding in new
            )
            yield Breakage(change.commit, change.title, one.name, found)
