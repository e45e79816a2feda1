"""Whom an upstream commit breaks: every use list judged before and after it, only where the commit touches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_compat.contract.scan import Branch
from mcore_compat.contract.source.git import GitError, git, resolve_commit
from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.matrix import suggestions
from mcore_compat.usage.model import GuardKind, Use
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.upstream import SummaryCache, UpstreamTree, git_tree
from mcore_compat.usage.use_lists import UseList

__all__ = ["Breakage", "branch_breaks", "commit_of_pull_request", "commits_of", "who_breaks"]


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


# The Megatron before the commit that first broke a use, by downstream and finding.
type Broken = dict[tuple[str, tuple[str, str, int, str]], Side]


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
    """Uses of all lists by symbol, and the files that each symbol's answer depends on in the tree at hand."""

    def __init__(self, lists: Sequence[UseList]) -> None:
        self.lists = lists
        self.files: dict[str, frozenset[str]] = {}
        # Places of uses in their list, by symbol: for whole histories a search through all uses takes too long.
        self._uses: list[dict[str, set[int]]] = []
        self._handlers: list[dict[str, set[int]]] = []
        for one in lists:
            by_symbol: dict[str, set[int]] = {}
            by_handler: dict[str, set[int]] = {}
            for place, use in enumerate(one.extracted.uses):
                for symbol in _symbols(use):
                    by_symbol.setdefault(symbol, set()).add(place)
                for guard in use.guards:
                    if guard.kind is GuardKind.HANDLER:
                        for symbol in guard.symbols:
                            by_handler.setdefault(symbol, set()).add(place)
            self._uses.append(by_symbol)
            self._handlers.append(by_handler)
        self.symbols = sorted({symbol for by_symbol in self._uses for symbol in by_symbol})

    def update(self, resolver: Resolver, symbols: Sequence[str]) -> None:
        """Read again on which files these symbols depend."""
        for symbol in symbols:
            self.files[symbol] = resolver.files_behind(symbol)

    def affected(self, changed: frozenset[str]) -> frozenset[str]:
        """Symbols whose answer can be another one after these files have changed."""
        return frozenset(symbol for symbol, files in self.files.items() if not files.isdisjoint(changed))

    def uses(self, number: int, affected: frozenset[str]) -> list[Use]:
        """Uses of the list of that number that concern these symbols, and the handlers that would rescue them."""
        by_symbol, by_handler = self._uses[number], self._handlers[number]
        places = {place for symbol in affected for place in by_symbol.get(symbol, ())}
        all_uses = self.lists[number].extracted.uses
        touched = {symbol for place in places for symbol in _symbols(all_uses[place])}
        places |= {place for symbol in touched for place in by_handler.get(symbol, ())}
        return [all_uses[place] for place in sorted(places)]


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
    side = Side.of(Resolver(before, cache))
    watched = _Watched(lists)
    broken: Broken = {}
    watched.update(side.resolver, watched.symbols)
    for change in changes:
        progress(change.title)
        after = _with(before, change)
        affected = watched.affected(frozenset(change.blobs))
        if affected:
            if side.resolver.tree is not before:
                side = Side.of(Resolver(before, cache))
            new = Side.of(Resolver(after, cache))
            yield from _judged(change, watched, affected, side, new, broken)
            watched.update(new.resolver, sorted(affected))
            side = new
        before = after


def branch_breaks(
    clone: Path, branches: Iterable[Branch], lists: Sequence[UseList], cache: SummaryCache
) -> Iterator[Breakage]:
    """Judge branches that are not merged yet, each against the commit in which it began.

    Args:
        clone: of Megatron-LM.
        branches: of :func:`mcore_compat.contract.scan.branches`.
        lists: of the downstreams.
        cache: of summaries.

    Raises:
        GitError: a commit is not in the clone.
    """
    watched = _Watched(lists)
    begun = ""
    side: Side | None = None
    for branch in branches:
        if side is None or begun != branch.base:
            begun = branch.base
            side = Side.of(Resolver(git_tree(clone, begun), cache))
            watched.update(side.resolver, watched.symbols)
        before, after = side.resolver.tree, git_tree(clone, branch.commit)
        changed = frozenset(
            path for path in {*before.keys, *after.keys} if before.keys.get(path) != after.keys.get(path)
        )
        affected = watched.affected(changed)
        if affected:
            title = f"{branch.ref} {branch.date} {branch.subject}"
            change = _Change(branch.commit, title, dict.fromkeys(changed))
            yield from _judged(change, watched, affected, side, Side.of(Resolver(after, cache)), {})


def _with(tree: UpstreamTree, change: _Change) -> UpstreamTree:
    keys = dict(tree.keys)
    for path, blob in change.blobs.items():
        if blob is None:
            keys.pop(path, None)
        else:
            keys[path] = blob
    return replace(tree, keys=keys, label=change.commit[:12], commit=change.commit, read=tree.reader(keys))


def _judged(
    change: _Change, watched: _Watched, affected: frozenset[str], before: Side, after: Side, broken: Broken
) -> Iterator[Breakage]:
    for number, one in enumerate(watched.lists):
        uses = watched.uses(number, affected)
        if not uses:
            continue
        old = {finding.key for finding in check_uses(uses, before)}
        new = [finding for finding in check_uses(uses, after, before) if finding.key not in old]
        new = [f for f in new if not _mended(f, uses, after, broken.get((one.name, f.key)))]
        if new:
            for finding in new:
                broken.setdefault((one.name, finding.key), before)
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


def _mended(finding: UsageFinding, uses: Sequence[Use], after: Side, origin: Side | None) -> bool:
    """Whether upstream went back to what it was before it broke this use: then the change is a repair."""
    if origin is None:
        return False
    own = [use for use in uses if (use.file, use.line) == (finding.file, finding.line)]
    return all(found.key != finding.key for found in check_uses(own, after, origin))
