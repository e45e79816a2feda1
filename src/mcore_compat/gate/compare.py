"""Two results of the same suite on the same subject: what is new, fixed, the same, or flaky. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping

from mcore_compat.contract.model import Json
from mcore_compat.gate.model import GateFinding, State
from mcore_compat.results import AS_DECLARED, FAILED_CHECK, CellResult, Finding, signature
from mcore_compat.verdicts import Verdict, rank_in_cell

__all__ = ["contract_change", "excused", "pair_cells", "vanished"]

_MAX_DIFF = 24
# The record is made in float64 and rounded to nine digits; another order of summation changes the thirteenth.
STOCK_TOLERANCE = 1e-8


def _failures(cell: CellResult) -> dict[tuple[str, str], Finding]:
    """What failed in a cell, by what it is about: a check, or else the finding's kind and what it says.

    A failure that is declared is reported too, as drift: a run is green with it, and whoever upgrades must know of it.
    """
    found: dict[tuple[str, str], Finding] = {}
    for finding in cell.findings:
        if finding.verdict is not None:
            found.setdefault((finding.kind, finding.check or finding.signature), finding)
    known = {finding.check: finding for finding in cell.findings if finding.kind == AS_DECLARED}
    for result in cell.results:
        if result.outcome == "failed" and result.expected:
            note = known.get(result.check)
            declared = Finding(
                kind=FAILED_CHECK,
                check=result.check,
                message=result.message,
                verdict=Verdict.DRIFT,
                next_step=f"It is known, expectations.toml has it{f': {note.message}' if note else ''}.",
                link=note.link if note else None,
            )
            found.setdefault((FAILED_CHECK, result.check), declared)
    return found


def pair_cells(
    baseline: CellResult,
    candidate: CellResult,
    again: tuple[CellResult, CellResult] | None = None,
    upstream: frozenset[str] = frozenset(),
) -> tuple[GateFinding, ...]:
    """Compare two judged cells.

    A check that fails on both sides is the same failure only if both say the same; otherwise the candidate's is new.

    Args:
        baseline: the side that is in use.
        candidate: the side that is asked about.
        again: both sides run once more, if they differed the first time. What is not the same again is flaky: it is
            reported, and never taken for a pass.
        upstream: checks that failed in the candidate without any code of the subject.
    """
    before, after = _failures(baseline), _failures(candidate)
    second = tuple(_failures(cell) for cell in again) if again is not None else None
    keys = {*before, *after, *(key for side in second or () for key in side)}
    findings = []
    for key in sorted(keys):
        first = _state(before.get(key), after.get(key))
        state, note = first, ""
        if second is not None and first != "same" and _state(second[0].get(key), second[1].get(key)) != first:
            state, note = "flaky", "the second run of the same environments gave another result"
        elif state == "new" and key in before:
            note = f"the baseline fails it too, for another reason: {before[key].headline[:200]}"
        seen = [after, before, *(reversed(second) if second is not None else ())]
        finding = next(side[key] for side in seen if key in side)
        findings.append(_as_gate_finding(finding, state or "flaky", note, upstream))
    return (*findings, *_stock_changes(baseline, candidate))


def vanished(baseline: CellResult, candidate: CellResult) -> tuple[GateFinding, ...]:
    """Checks that ran on the baseline and not on the candidate; for a suite whose checks nobody declares.

    A check that skips itself, or a file that collects nothing, must not make a candidate look good.
    """
    ran = {result.check: result.outcome for result in candidate.results}
    lost = [r for r in baseline.results if r.outcome != "skipped" and ran.get(r.check, "skipped") == "skipped"]
    return tuple(
        GateFinding(
            origin="cell",
            title="missing-check",
            state="new",
            level="unproven",
            message=f"{result.check} runs on the baseline and {_now(result.check, ran)} now",
            next_step="Make it run on the candidate, or declare the checks in an inventory.",
        )
        for result in lost
    )


def _now(check: str, ran: Mapping[str, str]) -> str:
    return "is skipped" if check in ran else "is not there"


def _as_gate_finding(finding: Finding, state: State, note: str, upstream: frozenset[str]) -> GateFinding:
    return GateFinding(
        origin="cell",
        title=finding.check or finding.kind,
        state=state,
        level=finding.weight,
        message=finding.message,
        link=finding.link,
        next_step=finding.next_step,
        witness_note=note,
        upstream=state == "new" and finding.check in upstream,
    )


def _state(before: Finding | None, after: Finding | None) -> State | None:
    """The state of a pair; None if neither side has it."""
    if before is None and after is None:
        return None
    if after is None:
        return "fixed"
    return "same" if before is not None and before.signature == after.signature else "new"


def _stock_changes(baseline: CellResult, candidate: CellResult) -> Iterator[GateFinding]:
    """What unpatched megatron-core computes otherwise with the same weights; other records are not compared."""
    for name in sorted(baseline.stock.keys() & candidate.stock.keys()):
        old, new = baseline.stock[name], candidate.stock[name]
        if _differ(old, new):
            yield GateFinding(
                origin="cell",
                title="stock-changed",
                state="new",
                level="drift",
                message=f"stock megatron-core gives other {name}: {_few(old)} before, {_few(new)} now",
                next_step="Find out whether upstream meant it: a default or the mathematics changed, without our code.",
            )


def _differ(old: tuple[float, ...], new: tuple[float, ...]) -> bool:
    return len(old) != len(new) or any(
        abs(a - b) > STOCK_TOLERANCE * max(abs(a), abs(b), 1.0) for a, b in zip(old, new, strict=True)
    )


def _few(values: tuple[float, ...]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:3])
    return f"[{shown}, …]" if len(values) > 3 else f"[{shown}]"


def excused(candidate: CellResult, baseline: CellResult) -> CellResult:
    """The candidate's cell, with the failures that are declared for the baseline's as declared here too.

    ``expectations.toml`` speaks of cells of the matrix; a build of the same surface has the same known failures. Only a
    failure of the same check that says the same is one of them.
    """
    declared = {r.check: signature(r.message) for r in baseline.results if r.outcome == "failed" and r.expected}

    def known(check: str | None, message: str) -> bool:
        return check is not None and declared.get(check) == signature(message)

    findings = [
        finding.model_copy(update={"kind": AS_DECLARED, "verdict": None})
        if finding.kind == FAILED_CHECK and known(finding.check, finding.message)
        else finding
        for finding in candidate.findings
    ]
    if findings == list(candidate.findings):
        return candidate
    findings.sort(key=lambda finding: rank_in_cell(finding.verdict))
    results = tuple(
        r.model_copy(update={"expected": True}) if r.outcome == "failed" and known(r.check, r.message) else r
        for r in candidate.results
    )
    verdict = findings[0].verdict or Verdict.OK
    reason = f"as declared for {baseline.id}" if verdict is Verdict.OK else findings[0].headline
    update = {"findings": tuple(findings), "results": results, "verdict": verdict, "reason": reason}
    return candidate.model_copy(update=update)


def contract_change(old: Json, new: Json) -> tuple[str, ...]:
    """A contract item's value before and after, as lines of a diff."""
    before, after = (
        [] if value is None else [line.rstrip(",") for line in json.dumps(value, indent=1, sort_keys=True).splitlines()]
        for value in (old, new)
    )
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    lines = [line for line in lines if not line.startswith("@@")]
    return (*lines[:_MAX_DIFF], f"… {len(lines) - _MAX_DIFF} more lines") if len(lines) > _MAX_DIFF else tuple(lines)
