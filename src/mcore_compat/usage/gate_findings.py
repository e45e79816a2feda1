"""The gate's first step, before any environment is made: does the project's own source fit the candidate?"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_compat.contract.source.candidate import Candidate
from mcore_compat.gate.model import GateFinding, Lines, SourceCheck, State, Tier
from mcore_compat.project import Project
from mcore_compat.usage.check import Side
from mcore_compat.usage.expectations import UsageExpectations, apply_expectations, load_usage_expectations
from mcore_compat.usage.extract import Extracted, extract_uses
from mcore_compat.usage.findings import Severity, UsageFinding
from mcore_compat.usage.matrix import UsageReport, assess
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.sources import NoPythonError, open_source, patch_files
from mcore_compat.usage.targets import known_releases, open_tree
from mcore_compat.usage.upstream import SummaryCache
from mcore_compat.usage.witness import witness_lines

__all__ = ["USAGE_FILE", "check_source", "usage_findings"]

USAGE_FILE = "usage.toml"
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


def usage_findings(
    root: Path,
    candidate: Candidate,
    baseline: Candidate | None = None,
    include: tuple[str, ...] = (),
    cache: SummaryCache | None = None,
) -> tuple[UsageFinding, ...]:
    """Findings about the source below ``root`` with the candidate.

    Args:
        root: folder of the adopter's source.
        candidate: the Megatron that is to be judged.
        baseline: the Megatron that the source works with; with it only what the candidate adds is told, and also what
            fails silently.
        include: folders of the source; everything but its tests where empty.
        cache: of summaries; one is opened and closed where None.
    """
    _, report = _assessed(root, candidate, baseline, include, cache)
    before = {f.key for f in report.columns[0].findings} if baseline is not None else set()
    return tuple(finding for finding in report.columns[-1].findings if finding.key not in before)


def check_source(
    project: Project, baseline: Candidate, candidate: Candidate, today: dt.date, cache: SummaryCache | None = None
) -> SourceCheck:
    """Read the project's own source against both sides of a gate; nothing is run.

    Args:
        project: whose source it is; its ``usage.toml`` names the folders to read and the expected findings.
        baseline: the megatron-core in use.
        candidate: the one that is asked about.
        today: decides which expectations have expired.
        cache: of summaries; one is opened and closed where None.

    Raises:
        SourceError: a side or the source cannot be read.
        ExpectationError: ``usage.toml`` is damaged.
    """
    begun = time.monotonic()
    own_data = project.data.is_relative_to(project.root)
    if not own_data and not any((project.root / mark).exists() for mark in _MARKS):
        return _not_read("this folder is not a project")
    path = project.data / USAGE_FILE
    declared = load_usage_expectations(path) if own_data and path.is_file() else UsageExpectations(schema_version=1)
    try:
        extracted, report = _assessed(project.root, candidate, baseline, declared.include, cache)
    except NoPythonError:
        return _not_read("the project has no Python source")
    report = apply_expectations(report, declared, today)
    findings, witnesses = _gate_findings(report, extracted)
    findings += [_stale(problem, path.relative_to(project.root).as_posix()) for problem in report.stale]
    findings += [_unread(problem) for problem in report.unread]
    seconds = round(time.monotonic() - begun, 1)
    note = f"{report.symbols} symbols of Megatron in {report.uses} uses; nothing was run"
    return SourceCheck(Tier(name="usage", ran=True, seconds=seconds, note=note), tuple(findings), witnesses)


def _not_read(note: str) -> SourceCheck:
    return SourceCheck(Tier(name="usage", ran=False, note=note))


def _assessed(
    root: Path, candidate: Candidate, baseline: Candidate | None, include: tuple[str, ...], cache: SummaryCache | None
) -> tuple[Extracted, UsageReport]:
    opened = open_source(str(root), include=include)
    extracted = extract_uses(opened)
    store = cache or SummaryCache()
    releases = known_releases()
    try:
        named = [candidate] if baseline is None else [baseline, candidate]
        sides = [Side.of(Resolver(open_tree(one, releases, store), store), one.label) for one in named]
        pin = baseline.label if baseline is not None else None
        return extracted, assess(extracted, sides, pin=pin, patches=patch_files(opened))
    finally:
        if cache is None:
            store.close()


def _gate_findings(report: UsageReport, extracted: Extracted) -> tuple[list[GateFinding], dict[int, Lines]]:
    """Findings with their state, and the witnesses of those that are new."""
    findings: list[GateFinding] = []
    witnesses: dict[int, Lines] = {}
    for state, finding in _with_states(report):
        if state == "new" and not finding.expected:
            lines = witness_lines(finding, extracted.uses)
            if lines is not None:
                witnesses[len(findings)] = lines
        findings.append(_gate_finding(finding, state))
    return findings, witnesses


def _with_states(report: UsageReport) -> Iterator[tuple[State, UsageFinding]]:
    before, after = report.columns[0].findings, report.columns[-1].findings
    known, there = {f.key for f in before}, {f.key for f in after}
    for finding in after:
        yield ("same" if finding.key in known else "new"), finding
    for finding in before:
        if finding.key not in there:
            yield "fixed", finding


def _gate_finding(finding: UsageFinding, state: State) -> GateFinding:
    instead = f" Upstream has {', '.join(finding.replacement)}." if finding.replacement else ""
    if finding.expected:
        level, more = "info", f" (expected: {finding.expected})"
    else:
        level, more = ("drift" if finding.severity is Severity.SILENT else "break"), ""
    return GateFinding.model_validate(
        {
            "origin": "usage",
            "title": finding.rule,
            "state": state,
            "level": level,
            "message": f"{finding.severity.value}: {finding.message}{instead}{more}",
            "where": finding.upstream or None,
            "source": finding.where,
            "item": finding.symbol,
        }
    )


def _stale(problem: str, file: str) -> GateFinding:
    return GateFinding(
        origin="usage",
        title="usage-expectation-stale",
        state="new",
        level="break",
        message=problem,
        source=f"{file}:1",
        next_step=f"Remove the entry from {file}, or renew its date.",
    )


def _unread(problem: str) -> GateFinding:
    path = problem.partition(":")[0]
    return GateFinding(
        origin="usage",
        title="source-unread",
        state="new",
        level="unproven",
        message=f"The file cannot be read as Python: {problem}.",
        source=f"{path}:1",
        next_step=f"Correct {path}, or name the folders to read as `include` in {USAGE_FILE}.",
    )
