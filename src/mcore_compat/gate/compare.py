"""Two results of the same suite on the same subject: what is new, fixed, the same, or flaky. Pure."""

from __future__ import annotations

from mcore_compat.gate.model import GateFinding, State
from mcore_compat.results import AS_DECLARED, FAILED_CHECK, CellResult, Finding
from mcore_compat.verdicts import Verdict

__all__ = ["pair_cells"]


def _failures(cell: CellResult) -> dict[tuple[str, str], Finding]:
    """What failed in a cell, by what it is about; messages are not part of that.

    A failure that is declared is told too, as drift: a run is green with it, and whoever upgrades must hear of it.
    """
    found: dict[tuple[str, str], Finding] = {}
    for finding in cell.findings:
        if finding.verdict is not None:
            # Without a check the message may list many names; the kind says what it is about.
            found.setdefault((finding.kind, finding.check or ""), finding)
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

    Args:
        baseline: the side that is in use.
        candidate: the side that is asked about.
        again: both sides run once more, where they differed the first time. A difference that is not there again is
            flaky: told, and never taken for a pass.
        upstream: checks that failed in the candidate without any code of ours.
    """
    before, after = _failures(baseline), _failures(candidate)
    second = tuple(_failures(cell) for cell in again) if again is not None else (before, after)
    findings = []
    for key in sorted({*before, *after}):
        finding = after.get(key) or before[key]
        state = _state(key in before, key in after)
        note = ""
        if (
            again is not None
            and state != "same"
            and (key in second[0], key in second[1]) != (key in before, key in after)
        ):
            state, note = "flaky", "the second run of the same environments gave another result"
        elif state == "same" and before[key].signature != after[key].signature:
            note = f"failed before too, with another message: {before[key].headline[:200]}"
        findings.append(
            GateFinding(
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
        )
    return tuple(findings)


def _state(before: bool, after: bool) -> State:
    if before and after:
        return "same"
    return "new" if after else "fixed"
