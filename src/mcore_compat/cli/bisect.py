"""``mcore-compat bisect``: thin; it reads arguments, calls the search, prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcore_compat.bisect.question import Question, question_for
from mcore_compat.bisect.run import bisect_commits, bisect_releases, check_runner
from mcore_compat.bisect.search import NotBisectableError
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.rule import Rule, load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.candidate import Candidate, CandidateKind, parse_candidate
from mcore_compat.contract.source.git import read_git, resolve_commit
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.pipeline.lanes import IndexLane
from mcore_compat.pipeline.progress import display_for
from mcore_compat.project import Project
from mcore_compat.releases import PROJECT
from mcore_compat.report import bisect_text as render

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
    console = Console(stderr=True)
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

    with display_for(console, 1) as display:
        runner = None
        if check is not None:
            requirements = load_matrix(project.matrix_file).requirements
            lane = IndexLane.open(project, requirements, os.environ)
            runner = check_runner(project, check, candidate_of, contracts, lane, display, os.environ)
        if repository is None:
            result = bisect_releases(contracts, rules, question, good, bad, runner)
        else:
            result = bisect_commits(repository, rules, question, good, bad, _step, runner)
    typer.echo(render.text(result), nl=False)


def _question(
    check: str | None,
    item: str | None,
    rule: str | None,
    rules: tuple[Rule, ...],
    ends: tuple[Contract, Contract],
) -> Question:
    """With a check the contract only explains: every change between the two neighbours is reported."""
    if check is not None:
        if item is not None or rule is not None:
            raise NotBisectableError("--check asks by running, --item and --rule by source.", "Give one of them.")
        return Question("check", check)
    return question_for(rules, *ends, item=item, rule=rule)


def _step(described: str) -> None:
    typer.echo(f"  asking {described}", err=True)
