"""What the branches of an upstream repository would change for us, each judged against where it left main.

An upstream change is cheapest to answer before it is merged. Only what a branch itself changes is told: its contract is
compared with that of the commit it started from, so a branch that is merely old says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import Finding, FindingState, compare_contracts, level_of
from mcore_compat.contract.rules.rule import Level, Rule
from mcore_compat.contract.source.git import GitError, git, read_git, resolve_commit
from mcore_compat.contract.source.tree import SourceError, wanted

__all__ = ["Branch", "Scanned", "as_line", "branches", "scan"]

# Branches that start from one commit come together in a listing by date; a contract takes seconds to read.
_KEPT_CONTRACTS = 64


@dataclass(frozen=True)
class Branch:
    """One branch: its name as git shortens it, its tip, the tip's date and subject, and where it began."""

    ref: str
    commit: str
    date: str
    subject: str
    base: str


@dataclass(frozen=True)
class Scanned:
    """One branch.

    Attributes:
        ref: its name as git shortens it.
        commit: its tip.
        date: of the tip, ISO 8601.
        subject: first line of the tip's message.
        findings: what is new with it.
        problem: why it could not be read; "" where it could.
    """

    ref: str
    commit: str
    date: str
    subject: str
    findings: tuple[Finding, ...] = ()
    problem: str = ""

    @property
    def level(self) -> Level | None:
        """The worst of its findings."""
        return level_of(self.findings)

    @property
    def judgement(self) -> str:
        """The level, ``nothing``, or ``not read``."""
        return "not read" if self.problem else self.level or "nothing"


def scan(repository: Path, patterns: Sequence[str], onto: Sequence[str], rules: Sequence[Rule]) -> Iterator[Scanned]:
    """Judge every branch that a pattern names, the newest first, as they are read.

    Args:
        repository: a checkout or bare repository; nothing in it is run or written.
        patterns: as git's own, ``refs/pull/*/head`` or ``refs/heads/pull-request``.
        onto: branches that these branches start from; of each the nearest counts.
        rules: what is told.

    Raises:
        GitError: no repository, no such branch in ``onto``, or a pattern that names nothing.
    """
    contract_of = lru_cache(_KEPT_CONTRACTS)(lambda commit: extract(read_git(repository, commit), commit[:12]))
    for ref, commit, date, subject in _tips(repository, patterns, onto):
        try:
            findings = _own_findings(repository, commit, onto, rules, contract_of)
        except SourceError as error:
            yield Scanned(ref, commit, date, subject, problem=error.problem)
        else:
            yield Scanned(ref, commit, date, subject, findings)


def branches(repository: Path, patterns: Sequence[str], onto: Sequence[str]) -> Iterator[Branch]:
    """Every branch that a pattern names, the newest first, with the commit in which it began.

    Raises:
        GitError: as for :func:`scan`, or a branch has no history in common with any of ``onto``.
    """
    for ref, commit, date, subject in _tips(repository, patterns, onto):
        yield Branch(ref, commit, date, subject, _start(repository, commit, onto))


def _tips(repository: Path, patterns: Sequence[str], onto: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    for branch in onto:
        resolve_commit(repository, branch)
    form = "--format=%(refname:short)%00%(objectname)%00%(committerdate:short)%00%(contents:subject)"
    listed = git(repository, ["for-each-ref", "--sort=-committerdate", form, "--", *patterns]).decode(errors="replace")
    # One pull request may have two refs of one commit.
    rows = {row[1]: row for row in reversed([line.split("\0") for line in listed.splitlines()])}
    if not rows:
        raise GitError(
            f"{repository.name} has no ref that matches {' '.join(patterns)}.",
            "fetch them first (`git fetch origin '+refs/pull/*/head:refs/pull/*/head'`), or see `git for-each-ref`.",
        )
    for row in reversed(rows.values()):
        yield row[0], row[1], row[2], row[3]


def _own_findings(
    repository: Path, commit: str, onto: Sequence[str], rules: Sequence[Rule], contract_of: Callable[[str], Contract]
) -> tuple[Finding, ...]:
    base = _start(repository, commit, onto)
    changed = git(repository, ["diff", "--name-only", "-z", base, commit]).decode(errors="replace").split("\0")
    if not any(wanted(path) for path in changed if path):
        return ()
    found = compare_contracts(contract_of(base), contract_of(commit), rules)
    return tuple(finding for finding in found if finding.state is FindingState.NEW)


def _start(repository: Path, commit: str, onto: Sequence[str]) -> str:
    """The commit in which the branch left the nearest of these branches."""
    starts = []
    for branch in onto:
        try:
            base = git(repository, ["merge-base", branch, commit]).decode().strip()
        except GitError:  # no common history
            continue
        starts.append((int(git(repository, ["rev-list", "--count", f"{base}..{commit}"])), base))
    if not starts:
        raise GitError(
            f"{commit[:12]} has no history in common with {', '.join(onto)}.", "name its branch with --onto."
        )
    return min(starts)[1]


def as_line(scanned: Scanned) -> str:
    """Head line of one branch: level, name, date, subject."""
    return f"{scanned.judgement:8} {scanned.ref}  {scanned.date}  {scanned.subject[:90]}"
