"""Bisect over releases and over commits: by source first, by running cells if a check is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.bisect.question import Question, answer, explained
from mcore_compat.bisect.search import Found, NotBisectableError, first_bad
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.contract.rules.compare import Finding
from mcore_compat.contract.rules.rule import Rule
from mcore_compat.contract.source.candidate import Candidate
from mcore_compat.contract.source.git import commits_between, describe_commit, git, read_git, resolve_commit
from mcore_compat.contract.source.tree import SourceError
from mcore_compat.gate.cells import candidate_cell, nearest_release
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.lanes import Lane
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.session import RunOptions, Session, prepare
from mcore_compat.project import Project
from mcore_compat.results import Report
from mcore_compat.subjects.selection import subject_of
from mcore_compat.verdicts import Verdict

__all__ = ["Bisected", "bisect_commits", "bisect_releases", "check_runner", "upstream_change"]

_MAX_DIFF_LINES = 60


@dataclass(frozen=True)
class Bisected:
    """What was found.

    Attributes:
        found: the last good and the first bad one.
        question: in words.
        findings: what the rules say between the two.
        changes: items that changed and have to do with the question, with both values.
        others: how many other items changed.
        source: description of the first bad commit, or None for releases.
        diff: upstream's change of the file concerned, shortened, or None.
    """

    found: Found
    question: str
    findings: tuple[Finding, ...]
    changes: tuple[tuple[str, object, object], ...]
    source: str | None = None
    diff: str | None = None
    others: int = 0


@dataclass(frozen=True)
class _Explanation:
    """What changed between the last good and the first bad one, as far as it has to do with the question."""

    findings: tuple[Finding, ...]
    changes: tuple[tuple[str, object, object], ...]
    others: int


def _explanation(question: Question, rules: Sequence[Rule], before: Contract, after: Contract) -> _Explanation:
    findings = explained(question, rules, before, after)
    items = {question.name} if question.kind == "item" else {finding.item for finding in findings}
    changed = [i for i in sorted(before.items.keys() | after.items.keys()) if before.value(i) != after.value(i)]
    named = [i for i in changed if any(i == item or i.startswith(f"{item}.") for item in items)]
    values = tuple((item, before.value(item), after.value(item)) for item in named)
    return _Explanation(findings, values, len(changed) - len(named))


def bisect_releases(
    contracts: Mapping[str, Contract],
    rules: Sequence[Rule],
    question: Question,
    good: str,
    bad: str,
    runner: Callable[[str], bool | None] | None = None,
) -> Bisected:
    """First bad release of those with a committed contract, oldest first from ``good`` to ``bad``.

    Args:
        contracts: by version, in order.
        rules: the rules.
        question: what is looked for; with a runner it only chooses what is explained.
        good: version at one end.
        bad: version at the other; may be the older one.
        runner: judges a version by running it, in place of the contract.

    Raises:
        NotBisectableError: an end is unknown, or is not what it is said to be.
    """
    names = list(contracts)
    for name in (good, bad):
        if name not in names:
            raise NotBisectableError(f"There is no committed contract of {name}.", f"There are: {', '.join(names)}.")
    first, last = names.index(good), names.index(bad)
    line = names[first : last + 1] if first <= last else names[last : first + 1][::-1]
    judge = runner or (lambda name: answer(question, rules, contracts[good], contracts[name]))
    found = first_bad(line, judge)
    told = _explanation(question, rules, contracts[found.good], contracts[found.bad])
    return Bisected(found, question.describe(), told.findings, told.changes, others=told.others)


def bisect_commits(
    repository: Path,
    rules: Sequence[Rule],
    question: Question,
    good: str,
    bad: str,
    on_step: Callable[[str], None] = lambda _: None,
    runner: Callable[[str], bool | None] | None = None,
) -> Bisected:
    """First bad commit after ``good`` up to ``bad``, along first parents, of those that touch megatron/core.

    A commit whose source does not parse cannot be judged; it is skipped and listed.

    Raises:
        GitError: a ref is missing, or ``good`` is no ancestor of ``bad``.
        NotBisectableError: an end is not what it is said to be.
    """
    start = resolve_commit(repository, good)
    line = [start, *commits_between(repository, good, bad)]

    @functools.cache
    def contract_of(commit: str) -> Contract:
        return extract(read_git(repository, commit), commit[:12])

    def judge(commit: str) -> bool | None:
        on_step(describe_commit(repository, commit))
        try:
            if runner is not None:
                return runner(commit)
            return answer(question, rules, contract_of(start), contract_of(commit))
        except SourceError:
            return None

    found = first_bad(line, judge)
    before, after = contract_of(found.good), contract_of(found.bad)
    told = _explanation(question, rules, before, after)
    places = [f.where for f in told.findings] + [after.items[i].where for i, *_ in told.changes if i in after.items]
    path = next((place.partition(":")[0] for place in places if place), None)
    return Bisected(
        found,
        question.describe(),
        told.findings,
        told.changes,
        describe_commit(repository, found.bad),
        upstream_change(repository, found.bad, path),
        told.others,
    )


def upstream_change(repository: Path, commit: str, path: str | None) -> str:
    """The commit's diff of one file, shortened with a count of what was cut; None: which files it touched."""
    shape = ["-U1"] if path else ["--stat=120"]
    text = git(
        repository,
        [
            *("diff", "--no-color", "--no-ext-diff", "--no-textconv", *shape),
            *(f"{commit}^", commit, "--", path or "megatron/core"),
        ],
    )
    lines = text.decode(errors="replace").splitlines()
    shown = lines[:_MAX_DIFF_LINES]
    if len(lines) > len(shown):
        shown.append(f"… {len(lines) - len(shown)} more lines of the diff")
    return "\n".join(shown)


def check_runner(
    project: Project,
    check: str,
    candidate_of: Callable[[str], tuple[Candidate, Contract]],
    contracts: Mapping[str, Contract],
    lane: Lane,
    display: Display,
    host: Mapping[str, str],
    run_session: Callable[[Session, Display], Report] = execute,
) -> Callable[[str], bool | None]:
    """A judge that runs the check: True if it fails in the candidate's cell, None if it did not run.

    Args:
        project: with the suite that has the check.
        check: ``file.py::test``.
        candidate_of: the megatron-core of a name on the line, and its contract.
        contracts: of the known releases, to find the nearest one.
        lane: makes the environments.
        display: shows progress.
        host: the caller's environment variables.
        run_session: runs the cell; a test gives another.
    """
    matrix = matrix_of(project)
    options = RunOptions(kind="bisect", only=check, subject=subject_of(project, None))

    def judge(name: str) -> bool | None:
        candidate, contract = candidate_of(name)
        cell = candidate_cell(candidate, contract, matrix, nearest_release(contract, contracts))
        session = prepare(project, (cell,), options, lane, host)
        report = run_session(session, display)
        session.folder.save_report(report)
        result = report.cells[0]
        if result.verdict in {Verdict.INFRA, Verdict.UNRESOLVABLE}:
            return None
        outcome = next((r.outcome for r in result.results if r.check == check), None)
        return None if outcome in {None, "skipped"} else outcome == "failed"

    return judge
