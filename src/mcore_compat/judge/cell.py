"""Turns what is known about a cell into one verdict. Pure, and suspicious: green needs proof, not the lack of failures.

Every complaint names its own verdict; the worst of them is the cell's. ``infra`` comes first, since failures in the
wrong environment mean nothing; a failed check comes before a missing one, since it is knowledge.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable

from mcore_compat.files.untrusted import printable
from mcore_compat.judge import criteria as complaints
from mcore_compat.judge.criteria import excused, found, fulfils
from mcore_compat.matrix.cells import PREDICTED, Cell
from mcore_compat.matrix.expectations import Expectation, Expectations
from mcore_compat.matrix.inventory import Inventory
from mcore_compat.records import CheckOutcome, Package, Provisioned, SuiteRun
from mcore_compat.results import (
    FAILED_CHECK,
    CellResult,
    CheckCounts,
    CheckResult,
    Evidence,
    Finding,
    MegatronCore,
    Seconds,
)
from mcore_compat.subjects.selection import OURS, ChosenSubject
from mcore_compat.verdicts import Verdict, rank_in_cell

__all__ = ["described", "failed_cell", "judge_cell", "judge_expectations"]

_DESCRIBED = 500


def judge_cell(
    cell: Cell,
    provisioned: Provisioned,
    run: SuiteRun | None,
    inventory: Inventory,
    expectations: Expectations,
    today: dt.date,
    drift: tuple[Finding, ...] = (),
    subject: ChosenSubject = OURS,
    rerun: Callable[[str], str] = lambda check: f"Run {check} again.",
    package: Package | None = None,
) -> CellResult:
    """The verdict of one cell.

    Args:
        cell: what was to be judged.
        provisioned: its environment, or the verdict in its place.
        run: what the suite left; None if it did not run.
        inventory: the checks that had to run.
        expectations: declared exceptions.
        today: decides which of them have expired.
        drift: what the static contract found to have moved; it makes a green cell ``drift``.
        subject: what the suite was asked to judge. Only a subject other than this project's own may lack capabilities:
            the checks about them do not apply, and the report says which and why.
        rerun: the next step of a failed check: the sentence that says how to run it again.
        package: the project's own package, which the suite must be seen to import; None: this project's, or none.

    Returns:
        The verdict; ``unproven`` with a ``judge-error`` if what the cell left cannot be judged at all. One cell never
        ends the run of the others.
    """
    try:
        return _judged(cell, provisioned, run, inventory, expectations, today, drift, subject, rerun, package)
    except Exception as exc:  # noqa: BLE001  whatever a cell wrote, it costs this cell alone
        return failed_cell(cell, Verdict.UNPROVEN, "judge-error", f"the cell cannot be judged: {described(exc)}")


def failed_cell(cell: Cell, verdict: Verdict, kind: str, message: str) -> CellResult:
    """The result of a cell of which nothing else is known."""
    step = "Read the cell's output.log and run it again; if it comes back, report it with the cell's folder."
    return CellResult(
        id=cell.id,
        megatron_core=MegatronCore(requested=cell.megatron_core),
        contract_class=cell.contract_class,
        lane=cell.lane,
        expected_mode=cell.expected_mode,
        verdict=verdict,
        reason=message.splitlines()[0],
        findings=(found(verdict, kind, message, step),),
    )


def described(exc: BaseException) -> str:
    """An exception in one printable line."""
    text = printable(str(exc), _DESCRIBED).strip()
    return f"{type(exc).__name__}: {text.splitlines()[0]}" if text else type(exc).__name__


def _judged(
    cell: Cell,
    provisioned: Provisioned,
    run: SuiteRun | None,
    inventory: Inventory,
    expectations: Expectations,
    today: dt.date,
    drift: tuple[Finding, ...],
    subject: ChosenSubject,
    rerun: Callable[[str], str],
    package: Package | None,
) -> CellResult:
    if provisioned.environment is None or run is None:
        return _not_run(cell, provisioned, len(inventory.declared(cell)))
    cell, corrected = _with_mode_seen(cell, run)
    declared = inventory.declared(cell) if inventory.is_declared else frozenset(run.log.checks)
    exceptions = expectations.of(cell)
    declared -= complaints.not_applicable(run, subject)
    findings = [
        *complaints.of_provisioning(provisioned.environment),
        *complaints.of_environment(cell, provisioned.environment.facts, run, subject),
        *complaints.of_checks(run, exceptions, rerun),
        *complaints.of_exceptions(run, exceptions, declared, today),
        *complaints.of_subject(run, subject, inventory.declared(cell)),
        *complaints.of_mode(cell, run, subject),
        *complaints.of_completeness(run),
        *(
            complaints.of_inventory(run, declared, exceptions)
            if inventory.is_declared
            else complaints.of_undeclared(run)
        ),
        # Another subject may lack what some cases of a check are about.
        *(complaints.of_cases(cell, run, inventory) if subject.is_ours else ()),
        *complaints.of_controls(run, inventory, subject),
        *complaints.of_evidence(cell, run, inventory, subject, package),
        *corrected,
        *(finding.model_copy(update={"verdict": Verdict.DRIFT}) for finding in drift),
    ]
    findings.sort(key=lambda finding: rank_in_cell(finding.verdict))
    verdict = (findings[0].verdict if findings else None) or Verdict.OK
    deciding = [finding for finding in findings if finding.verdict is verdict]
    left_out = max(0, len(inventory.declared(cell)) - len(declared))
    result = _result(cell, provisioned, run, declared, exceptions, left_out)
    return result.model_copy(
        update={
            "verdict": verdict,
            "reason": _reason(deciding) or _as_declared(result.results),
            "findings": tuple(findings),
        }
    )


def judge_expectations(
    expectations: Expectations, matrix: Iterable[Cell], results: Iterable[CellResult]
) -> tuple[Finding, ...]:
    """Exceptions that nothing needs: they name no cell of the matrix, or a check that none of their cells ran."""
    findings = [
        found(
            Verdict.BREAK,
            "expectation-unused",
            f"{entry} names no cell of the matrix",
            "Remove the entry.",
            entry.check,
        )
        for entry in expectations.without_cell(tuple(matrix))
    ]
    by_id = {cell.id: cell for cell in matrix}
    judged = [(by_id[result.id], result) for result in results if result.id in by_id and result.results]
    for entry in expectations.expectation:
        seen = [result for cell, result in judged if entry.covers(cell)]
        if seen and not any(entry.check == outcome.check for result in seen for outcome in result.results):
            findings.append(
                found(
                    Verdict.BREAK,
                    "expectation-unused",
                    f"{entry}: none of its {len(seen)} cells ran this check",
                    "Remove the entry, or correct the check's name.",
                    entry.check,
                )
            )
    return tuple(findings)


def _with_mode_seen(cell: Cell, run: SuiteRun) -> tuple[Cell, tuple[Finding, ...]]:
    """A predicted mode, corrected by what ran: more than the source promised is drift, less stays a break.

    The hook may be called in a way that reading does not follow. Where it was called and counted, it is there.
    """
    facts = run.facts
    if PREDICTED not in cell.tags or facts is None or (cell.expected_mode, facts.mode) != ("legacy", "hook"):
        return cell, ()
    if facts.evidence.hook_calls == 0:
        return cell, ()
    calls = facts.evidence.hook_calls
    finding = found(
        Verdict.DRIFT,
        "mode-corrected",
        f"the source was read as one without a working hook, and the hook was called {calls} times",
        "Update what the contract follows: the call of the hook is in another place than in known releases.",
    )
    return cell.model_copy(update={"expected_mode": "hook"}), (finding,)


def _not_run(cell: Cell, provisioned: Provisioned, planned: int) -> CellResult:
    verdict = provisioned.verdict or Verdict.INFRA
    finding = found(verdict, f"cell-{verdict.value}", provisioned.reason, provisioned.next_step)
    return CellResult(
        id=cell.id,
        megatron_core=MegatronCore(requested=cell.megatron_core),
        contract_class=cell.contract_class,
        lane=cell.lane,
        expected_mode=cell.expected_mode,
        verdict=verdict,
        reason=provisioned.reason,
        checks=CheckCounts(planned=planned),
        seconds=Seconds(provision=round(provisioned.seconds, 1)),
        findings=(finding,),
    )


def _result(
    cell: Cell,
    provisioned: Provisioned,
    run: SuiteRun,
    declared: frozenset[str],
    exceptions: tuple[Expectation, ...],
    left_out: int,
) -> CellResult:
    assert provisioned.environment is not None
    proved, facts = provisioned.environment.facts, run.facts
    imported = proved.imported
    launches = facts.launches if facts else {}
    outcomes = [
        _check_result(check, outcome, exceptions, launches.get(check, 0))
        for check, outcome in sorted(run.log.checks.items())
    ]
    counts = {kind: sum(item.outcome == kind for item in outcomes) for kind in ("passed", "failed", "skipped")}
    suite_seconds = facts.seconds if facts else None
    return CellResult(
        id=cell.id,
        megatron_core=MegatronCore(
            requested=cell.megatron_core,
            distribution=proved.version("megatron-core"),
            attribute=(facts.megatron_core.attribute if facts else None) or (imported.attribute if imported else None),
            origin=(facts.megatron_core.origin if facts else None) or (imported.origin if imported else None),
            sha256=proved.megatron_files.sha256 if proved.megatron_files else None,
        ),
        contract_class=cell.contract_class,
        lane=cell.lane,
        python=proved.python,
        torch=facts.torch if facts else proved.version("torch"),
        triton=facts.triton if facts else proved.version("triton"),
        numpy=proved.version("numpy"),
        device=facts.device if facts else None,
        mode=facts.mode if facts else None,
        expected_mode=cell.expected_mode,
        verdict=Verdict.UNPROVEN,
        checks=CheckCounts(planned=len(declared), not_applicable=left_out, **counts),
        evidence=facts.evidence if facts else Evidence(),
        stock=facts.stock if facts else {},
        seconds=Seconds(
            provision=round(provisioned.seconds, 1),
            imports=round(suite_seconds.imports, 1) if suite_seconds else 0.0,
            suite=round(run.finished.seconds, 1),
        ),
        results=tuple(outcomes),
    )


def _check_result(check: str, outcome: CheckOutcome, exceptions: tuple[Expectation, ...], launches: int) -> CheckResult:
    entry = excused(check, exceptions)
    expected = outcome.outcome == "passed" if entry is None else fulfils(outcome, entry)
    return CheckResult(
        check=check,
        outcome=outcome.outcome,
        expected=expected,
        cases=outcome.cases,
        launches=launches,
        seconds=round(outcome.seconds, 2),
        message=outcome.message,
    )


def _reason(findings: list[Finding]) -> str:
    if not findings:
        return ""
    first = findings[0]
    head = first.message.splitlines()[0] if first.message else first.kind
    if first.check and first.kind == FAILED_CHECK:
        head = f"{first.check.rsplit('::', 1)[-1]}: {head}"
    return head + (f" (+{len(findings) - 1} more)" if len(findings) > 1 else "")


def _as_declared(results: Iterable[CheckResult]) -> str:
    """What a green cell does not count as passed, and why it is green all the same."""
    names = [result.check.rsplit("::", 1)[-1] for result in results if result.outcome != "passed" and result.expected]
    if not names:
        return ""
    more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
    return f"as declared in expectations.toml: {names[0]}{more}"
