"""``mcore-compat bisect``: thin; it reads arguments, calls the search, prints."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

import typer

from mcore_compat.bisect.question import Question, question_for
from mcore_compat.bisect.run import bisect_commits, bisect_releases, check_runner
from mcore_compat.bisect.search import NotBisectableError
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.contract.rules.rule import Rule, load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.candidate import Candidate, CandidateKind, parse_candidate
from mcore_compat.contract.source.git import read_git, resolve_commit
from mcore_compat.matrix.inventory import Inventory, load_inventory
from mcore_compat.pipeline.lanes import IndexLane
from mcore_compat.project import Project
from mcore_compat.releases import PROJECT
from mcore_compat.report import bisect_text as render
from mcore_compat.results import CellResult
from mcore_compat.verdicts import Verdict

__all__ = ["bisect"]


def bisect(
    good: Annotated[str, typer.Option("--good", "-g", help="A version, or a ref of the repository.")],
    bad: Annotated[str, typer.Option("--bad", "-b", help="A version, or a ref of the repository.")],
    repository: Annotated[Path | None, typer.Option("--repo", help="Search its commits; default: releases.")] = None,
    item: Annotated[str | None, typer.Option("--item", help="Look for a change of this contract item.")] = None,
    rule: Annotated[str | None, typer.Option("--rule", help="Look for where this rule begins to apply.")] = None,
    check: Annotated[str | None, typer.Option("--check", help="Look for where this check fails, by running.")] = None,
    suite: Annotated[Path | None, typer.Option(help="The check's folder, with --check; default: tests/compat.")] = None,
    report_dir: Annotated[Path | None, typer.Option(help="Where runs are written; default: reports/.")] = None,
    cells_dir: Annotated[Path | None, typer.Option(help="Where environments live; default: .cells/.")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="The project's root.")] = None,
) -> None:
    """Find the first release or commit in which something changed; by source, or by running one check."""
    find = Project.readable if check is None else Project.find
    project = find(root).with_paths(suite=suite, cells=cells_dir, reports=report_dir)
    rules, contracts = load_rules(project.rules), load_snapshots(project.contracts)
    if repository is None:
        unknown = [name for name in (good, bad) if name not in contracts]
        if unknown:
            raise NotBisectableError(
                f"There is no committed contract of {unknown[0]}.", f"There are: {', '.join(contracts)}."
            )
        ends = contracts[good], contracts[bad]
    else:
        ends = (
            extract(read_git(repository, good), good),
            extract(read_git(repository, bad), bad),
        )
    question = _question(check, item, rule, rules, ends)

    def candidate_of(name: str) -> tuple[Candidate, Contract]:
        if repository is None:
            return parse_candidate(name), contracts[name]
        commit = resolve_commit(repository, name)
        address = f"{PROJECT} @ git+file://{repository.resolve()}@{commit}"
        found = Candidate(CandidateKind.GIT, commit[:12], address, path=repository, ref=commit)
        return found, extract(read_git(repository, commit), commit[:12])

    runner = None
    if check is not None:
        if suite is None and project.declares_checks:
            _known_check(check, load_inventory(project.inventory))
        lane = IndexLane.open(project, matrix_of(project).requirements, os.environ)
        runner = _spoken(check_runner(project, check, candidate_of, contracts, lane, _Steps(), os.environ))
    if repository is None:
        result = bisect_releases(contracts, rules, question, good, bad, runner)
    else:
        result = bisect_commits(repository, rules, question, good, bad, _step, runner)
    typer.echo(render.text(result), nl=False)


class _Steps:
    """Shows what is done for one release or commit; the answer is shown by :func:`_spoken`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def phase(self, cell_id: str, phase: str) -> None:
        typer.echo(f"  {cell_id}: {phase}", err=True)

    def cases(self, cell_id: str, count: int) -> None:
        pass

    def done(self, result: CellResult) -> None:
        if result.verdict in {Verdict.INFRA, Verdict.UNRESOLVABLE}:
            typer.echo(f"  {result.id}: {result.reason}", err=True)


def _spoken(judge: Callable[[str], bool | None]) -> Callable[[str], bool | None]:
    """The judge, saying what it found. No other check runs, so the cell's own verdict means nothing."""

    def spoken(name: str) -> bool | None:
        failed = judge(name)
        answer = {True: "the check fails", False: "the check passes", None: "the check did not run"}[failed]
        typer.echo(f"  {name[:12]}: {answer}", err=True)
        return failed

    return spoken


def _known_check(check: str, inventory: Inventory) -> None:
    """Refuse a check that the suite does not have, before any environment is made.

    Raises:
        NotBisectableError: there is no such check.
    """
    known = [entry.id for entry in inventory.check]
    if check not in known:
        similar = difflib.get_close_matches(check, known, n=3, cutoff=0.3)
        raise NotBisectableError(
            f"There is no check {check!r}.", f"Write it as in {', '.join(similar) or known[0]}; or name its --suite."
        )


def _question(
    check: str | None,
    item: str | None,
    rule: str | None,
    rules: tuple[Rule, ...],
    ends: tuple[Contract, Contract],
) -> Question:
    """With a check the contract only explains what changed between the two neighbours."""
    if check is not None:
        if item is not None or rule is not None:
            raise NotBisectableError("--check runs cells; --item and --rule read sources.", "Give one of them.")
        return Question("check", check)
    return question_for(rules, *ends, item=item, rule=rule)


def _step(described: str) -> None:
    typer.echo(f"  examining {described}", err=True)
