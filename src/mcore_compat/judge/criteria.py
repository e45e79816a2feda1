"""The rules of the judge: each looks at one side of a cell and yields what speaks against it. Pure.

Every finding carries the verdict that it alone would make of the cell.
"""

from __future__ import annotations

import datetime as dt
import signal
from collections.abc import Callable, Iterable, Mapping

from mcore_compat import versions
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.expectations import Expectation
from mcore_compat.matrix.inventory import Inventory, check_of
from mcore_compat.records import CheckOutcome, Environment, EnvironmentFacts, Package, SuiteRun
from mcore_compat.results import AS_DECLARED, FAILED_CHECK, Finding
from mcore_compat.subjects.selection import BUILT_IN, ChosenSubject
from mcore_compat.verdicts import Verdict

__all__ = [
    "excused",
    "found",
    "fulfils",
    "not_applicable",
    "of_cases",
    "of_checks",
    "of_completeness",
    "of_controls",
    "of_environment",
    "of_evidence",
    "of_exceptions",
    "of_inventory",
    "of_mode",
    "of_provisioning",
    "of_subject",
    "of_undeclared",
]

_SHOWN = 4
_TAIL_LINES = 6


def of_provisioning(environment: Environment) -> Iterable[Finding]:
    """Notes about how the environment was made, and about what it brings that is not loaded."""
    if environment.remade:
        yield Finding(
            kind="environment-remade",
            message=f"the environment was made again: {environment.remade}",
            next_step="Find out what wrote to it; environments are not to be changed by hand.",
        )
    plugins = environment.facts.plugins.get("megatron-core", ())
    if plugins:
        yield Finding(
            kind="candidate-plugin",
            message=f"megatron-core brings a pytest plugin, which is not loaded: {_listed(list(plugins))}",
            next_step="Read what it does; a plugin can turn failures into passes.",
        )


def of_environment(cell: Cell, proved: EnvironmentFacts, run: SuiteRun, subject: ChosenSubject) -> Iterable[Finding]:
    """The process that ran the checks must have used the environment that was proved.

    A suite without a fused forward may have imported no megatron.core; whether it may pass so is not decided here.
    """
    remedy = "Remove the cell's folder below the cells directory and run again."

    def wrong(kind: str, message: str) -> Finding:
        return found(Verdict.INFRA, kind, message, remedy)

    facts = run.facts
    if facts is not None:
        seen = facts.megatron_core
        installed = proved.version("megatron-core")
        if cell.source is None and (
            seen.distribution is None or not versions.agree(cell.megatron_core, seen.distribution)
        ):
            yield wrong("wrong-version", f"the suite ran megatron-core {seen.distribution}, not {cell.megatron_core}")
        elif seen.distribution != installed:
            yield wrong("wrong-version", f"the suite saw megatron-core {seen.distribution}, {installed} was installed")
        if cell.source is None and seen.attribute and not versions.agree(cell.megatron_core, seen.attribute):
            yield wrong("wrong-version", f"megatron.core says that it is {seen.attribute}, not {cell.megatron_core}")
        known = subject.is_fused or seen.origin is not None
        if known and proved.imported is not None and seen.origin != proved.imported.origin:
            yield wrong("wrong-origin", f"megatron.core was imported from {seen.origin}, not {proved.imported.origin}")
        for name, value in (("torch", facts.torch), ("triton", facts.triton), ("numpy", facts.numpy)):
            version = proved.version(name)
            if value is not None and version is not None and not versions.agree(version, value):
                yield wrong("wrong-version", f"the suite ran {name} {value}, {version} was installed")
    for origins in run.origins:
        for module, file in list(origins.foreign.items())[:_SHOWN]:
            yield wrong("foreign-module", f"{module} was imported from outside the environment: {file}")


def of_checks(run: SuiteRun, exceptions: tuple[Expectation, ...], rerun: Callable[[str], str]) -> Iterable[Finding]:
    """Files that cannot be imported, and checks that fail and were not expected to."""
    for place, message in run.log.collection_errors.items():
        yield found(Verdict.BREAK, "collection-error", f"{place} cannot be imported\n{message}", rerun(place), place)
    for check, outcome in sorted(run.log.checks.items()):
        entry = excused(check, exceptions)
        if outcome.failed and (entry is None or entry.kind != "fail"):
            yield found(Verdict.BREAK, FAILED_CHECK, outcome.message or "no message", rerun(check), check)
        elif outcome.failed and entry is not None and not fulfils(outcome, entry):
            other = next(message for message in outcome.failures if not entry.is_meant(message))
            step = f"Declared is another failure (`{entry.failure}`). {rerun(check)}"
            yield found(Verdict.BREAK, FAILED_CHECK, other or "no message", step, check)


def of_exceptions(
    run: SuiteRun, exceptions: tuple[Expectation, ...], declared: frozenset[str], today: dt.date
) -> Iterable[Finding]:
    """Declared exceptions that have expired, or whose check no longer goes as declared; those that hold are notes."""
    for entry in exceptions:
        outcome = run.log.checks.get(entry.check)
        if outcome is None and entry.check not in declared:
            continue  # another cell of the pattern may have it; that none has is found over all cells
        if entry.expired(today):
            message, step = f"{entry} expired on {entry.expires}", "Look again: fix the cause, or renew with a reason."
        elif outcome is not None and outcome.failed and entry.kind == "fail" and not fulfils(outcome, entry):
            continue  # it fails for another reason, which is a failed check like any other
        elif outcome is not None and not fulfils(outcome, entry):
            message, step = f"{entry} is stale: the check {outcome.outcome}", "Remove the entry."
        else:
            if outcome is not None:
                yield Finding(
                    kind=AS_DECLARED,
                    message=f"{'fails' if entry.kind == 'fail' else 'is skipped'} as declared: {entry.reason}",
                    check=entry.check,
                    next_step=f"None until {entry.expires}; a check that goes otherwise turns the run red.",
                    link=entry.link,
                )
            continue
        yield found(Verdict.BREAK, "expectation-stale", message, step, entry.check)


def _claims(run: SuiteRun, subject: ChosenSubject, *any_of: str) -> bool:
    """Whether the subject promises one of these; this project's own library promises everything.

    An ordinary suite judges no fused forward, so nothing of one is promised.
    """
    if not subject.is_fused:
        return False
    said = run.facts.capabilities if run.facts is not None else None
    return subject.is_ours or said is None or bool(said & set(any_of))


def not_applicable(run: SuiteRun, subject: ChosenSubject) -> frozenset[str]:
    """Checks that are about what the subject says it has not; none for this project's own library."""
    facts = run.facts
    if subject.is_ours or facts is None or facts.capabilities is None:
        return frozenset()
    lacking = facts.lacks.keys() - facts.capabilities
    return frozenset(check for check, about in facts.not_applicable.items() if about and lacking >= set(about))


def of_subject(run: SuiteRun, subject: ChosenSubject, declared: frozenset[str]) -> Iterable[Finding]:
    """The suite must have judged what it was asked to; what does not apply to another subject is only reported."""
    facts = run.facts
    if facts is None:
        return
    if subject.variable in BUILT_IN and facts.subject != subject.variable:
        yield found(
            Verdict.UNPROVEN,
            "wrong-subject",
            f"the suite judged {facts.subject}, not {subject.name}",
            "Read the cell's output.log; the suite must load what MCORE_COMPAT_SUBJECT names.",
        )
    left_out = not_applicable(run, subject) & declared
    for capability, consequence in sorted(facts.lacks.items()):
        about = sum(capability in facts.not_applicable[check] for check in left_out)
        if about:
            yield Finding(
                kind="not-applicable",
                message=f"{subject.name} has no `{capability}`: {consequence}; {about} declared checks are about it",
                next_step="Nothing, if the subject is meant to be without it.",
            )


def of_mode(cell: Cell, run: SuiteRun, subject: ChosenSubject) -> Iterable[Finding]:
    """The subject must have chosen the expected mode by itself."""
    if not _claims(run, subject, "mode"):
        return
    if cell.expected_mode is None:
        step = "Give the cell `expected_mode`, hook or legacy, in the matrix."
        yield found(Verdict.UNPROVEN, "no-expected-mode", "the matrix does not say which mode is expected here", step)
        return
    if run.facts is not None and run.facts.mode is not None and run.facts.mode != cell.expected_mode:
        yield found(
            Verdict.BREAK,
            "wrong-mode",
            f"the subject chose {run.facts.mode} mode, {cell.expected_mode} was expected",
            "See mcore_fused.modes.capability; if upstream's hook changed, correct the cell's expected_mode.",
        )


def of_completeness(run: SuiteRun) -> Iterable[Finding]:
    """The suite's process must have ended by itself, with its log and its facts whole and agreeing."""
    finished, log = run.finished, run.log

    def unproven(kind: str, message: str, step: str = "Read the cell's output.log and run it again.") -> Finding:
        return found(Verdict.UNPROVEN, kind, message, step)

    if finished.excess:
        yield unproven("process-limit", f"the suite was killed: {finished.excess}" + _tail(finished.output))
    elif finished.timed_out:
        yield unproven(
            "time-limit",
            f"the suite was killed after {finished.seconds:.0f} s" + _tail(finished.output),
            "Find the check that hangs, or raise the cell's time_limit_s with a reason.",
        )
    elif finished.returncode < 0:
        yield unproven("crash", f"the suite's process died of {_signal(-finished.returncode)}" + _tail(finished.output))
    elif not log.checks and not log.collection_errors and finished.returncode not in {0, 5}:
        yield unproven("no-start", f"the suite did not start: {_last_error(finished.output)}" + _tail(finished.output))
    elif not log.complete:
        where = log.problem or (
            f"line {log.broken_line} cannot be read" if log.broken_line else "its last record is missing"
        )
        yield unproven("incomplete-log", f"the report log is incomplete: {where}" + _tail(finished.output))
    else:
        bad = bool(log.collection_errors) or any(outcome.failed for outcome in log.checks.values())
        if finished.returncode != log.exit_status or (finished.returncode == 0) == bad:
            yield unproven(
                "exit-status",
                f"pytest ended with status {finished.returncode}, which its log does not explain"
                + _tail(finished.output),
            )
    if finished.left_behind:
        yield Finding(
            kind="left-behind",
            message=f"processes outlived the suite and were killed: {_listed(list(finished.left_behind))}",
            next_step="Find out what started them: megatron-core, the subject, or a check.",
        )
    if run.facts is None:
        yield unproven("no-facts", run.facts_problem)
    elif not run.facts.complete:
        yield unproven("incomplete-facts", "the suite did not come to the end of its session")
    else:
        collected = {check_of(node) for node in run.facts.collected}
        lost = sorted(collected ^ set(log.checks))
        if log.complete and lost:
            yield unproven("count-mismatch", f"collected and reported differ in {_listed(lost)}")


def of_inventory(run: SuiteRun, declared: frozenset[str], exceptions: tuple[Expectation, ...]) -> Iterable[Finding]:
    """What ran and what was declared must be the same set."""
    checks = run.log.checks
    if not checks:
        yield _no_checks()
        return
    executed = {check for check, outcome in checks.items() if outcome.passed or outcome.failed}
    may_skip = {entry.check for entry in exceptions if entry.kind == "skip"}
    skipped = sorted(
        check for check, outcome in checks.items() if outcome.skipped and check in declared and check not in may_skip
    )
    if skipped:
        reasons = sorted({checks[check].message.splitlines()[0] for check in skipped if checks[check].message})
        because = f" ({'; '.join(reasons[:2])})" if reasons else ""
        yield found(
            Verdict.UNPROVEN,
            "skipped-check",
            f"{len(skipped)} declared checks were skipped, in whole or in part: {_listed(skipped)}{because}",
            "Make them run, or declare the skip in expectations.toml.",
        )
    missing = sorted(declared - executed - may_skip - set(skipped))
    if missing:
        yield found(
            Verdict.UNPROVEN,
            "missing-check",
            f"{len(missing)} declared checks did not run: {_listed(missing)}",
            "Make them run, or change inventory.toml.",
        )
    undeclared = sorted(executed - declared)
    if undeclared:
        yield found(
            Verdict.UNPROVEN,
            "undeclared-check",
            f"{len(undeclared)} checks ran that are not declared for this cell: {_listed(undeclared)}",
            "Declare them: `mcore-compat inventory --write`.",
        )


def of_undeclared(run: SuiteRun) -> Iterable[Finding]:
    """A suite without an inventory: something must have run; what was skipped is only told."""
    checks = run.log.checks
    if not checks:
        yield _no_checks()
        return
    skipped = sorted(check for check, outcome in checks.items() if outcome.outcome == "skipped")
    reasons = sorted({checks[check].message.splitlines()[0] for check in skipped if checks[check].message})
    because = f" ({'; '.join(reasons[:2])})" if reasons else ""
    if len(skipped) == len(checks):
        yield found(
            Verdict.UNPROVEN,
            "nothing-ran",
            f"all {len(checks)} checks were skipped{because}",
            "Make at least one run here, or leave this cell out of the matrix.",
        )
    elif skipped:
        yield Finding(
            kind="skipped-checks",
            message=f"{len(skipped)} checks were skipped: {_listed(skipped)}{because}",
            next_step="Nothing, if they are meant to be; an inventory makes a skipped check count.",
        )


def of_controls(run: SuiteRun, inventory: Inventory, subject: ChosenSubject) -> Iterable[Finding]:
    """Every declared control must have failed: what cannot fail in this environment proves nothing in it.

    A control about something that another subject lacks does not apply to it.
    """
    if run.facts is None:
        return
    step = "Something in the environment makes failures pass: a plugin, a start-up file, a changed comparison."
    passed = sorted(name for name, outcome in run.facts.controls.items() if outcome != "failed")
    if passed:
        message = f"checks pass against a subject that is wrong on purpose: {_listed(passed)}"
        yield found(Verdict.UNPROVEN, "control-passed", message, step)
    absent = sorted(set(inventory.controls) - run.facts.controls.keys() - not_applicable(run, subject))
    if absent:
        message = f"controls did not run: {_listed(absent)}"
        yield found(Verdict.UNPROVEN, "control-missing", message, "Read the cell's output.log; a suite runs them last.")


def of_cases(cell: Cell, run: SuiteRun, inventory: Inventory) -> Iterable[Finding]:
    """A check that ran must have run with all its cases."""
    wrong = []
    for check in inventory.check:
        outcome = run.log.checks.get(check.id)
        if outcome is None or not check.applies(cell):
            continue
        if check.cases is not None and outcome.cases != check.cases:
            wrong.append(f"{check.id} ({outcome.cases}, declared {check.cases})")
        elif check.cases_at_least is not None and outcome.cases < check.cases_at_least:
            wrong.append(f"{check.id} ({outcome.cases}, declared at least {check.cases_at_least})")
    if wrong:
        yield found(
            Verdict.UNPROVEN,
            "case-count",
            f"{len(wrong)} checks ran with another number of cases than declared: {_listed(wrong)}",
            "Make them run, or declare the new number: `mcore-compat inventory --write`.",
        )


def of_evidence(
    cell: Cell, run: SuiteRun, inventory: Inventory, subject: ChosenSubject, package: Package | None = None
) -> Iterable[Finding]:
    """What was promised must have been seen, by the counters and by the plugin.

    A subject that patches nothing promises no fusion, and has none to show; one that patches but counts nothing proves
    nothing. A project's own package must have been imported, if it has one: else its suite judged something else.
    """

    def unproven(message: str) -> Finding:
        step = (
            "Something switched the fused path off, or the suite never reached it; a green run needs to see it run."
            if subject.is_fused
            else "Let a test import and call what is to be judged; a green run needs to see it imported."
        )
        return found(Verdict.UNPROVEN, "no-evidence", message, step)

    if run.facts is not None:
        zero = [name for name in inventory.evidence.required(cell) if getattr(run.facts.evidence, name) == 0]
        if zero and _claims(run, subject, "patch", "evidence", "kernel"):
            yield unproven(f"nothing was counted for {', '.join(zero)}")
        few = [
            f"{name} ({getattr(run.facts.evidence, name)}, declared at least {least})"
            for name, least in inventory.evidence.least.items()
            if name in inventory.evidence.required(cell) and 0 < getattr(run.facts.evidence, name) < least
        ]
        if few and subject.is_ours:
            yield unproven(f"less was counted than a whole run of the suite gives: {', '.join(few)}")
        idle = _with_few_launches(cell, run, run.facts.launches, inventory) if subject.is_ours else []
        if idle:
            yield found(
                Verdict.UNPROVEN,
                "no-evidence",
                f"the fused head ran less often than declared in {len(idle)} checks: {_listed(idle)}",
                "Run with profile ci or nightly, and see what the checks no longer try; if that is meant, declare the "
                "new numbers: `mcore-compat inventory --write`.",
            )
        if run.facts.mode is None and _claims(run, subject, "mode"):
            yield unproven("the suite does not say which mode was used")
        if cell.lane == "gpu" and run.facts.device.lower() == "cpu":
            yield unproven("a GPU cell ran on the CPU")
    if not any(origins.modules.get("megatron", 0) for origins in run.origins):
        yield unproven("no process of the suite imported megatron")
    if package is not None and not any(seen.modules.get(name, 0) for seen in run.origins for name in package.modules):
        yield unproven(f"no process of the suite imported a module of {package.wheel.name}")
    if subject.is_ours and run.origins and not any(origins.modules.get("mcore_fused", 0) for origins in run.origins):
        yield unproven("no process of the suite imported the subject")
    peer = subject.peer
    if peer is not None and run.origins and not any(seen.modules.get(peer.distribution, 0) for seen in run.origins):
        yield unproven(f"no process of the suite imported a module of {peer.distribution}")


def _with_few_launches(cell: Cell, run: SuiteRun, launches: Mapping[str, int], inventory: Inventory) -> list[str]:
    """Checks that passed and tried less than they are declared to; one that failed may have ended early."""
    found = []
    for check in inventory.check:
        outcome = run.log.checks.get(check.id)
        if outcome is None or outcome.failed or check.launches_at_least is None or not check.applies(cell):
            continue
        seen = launches.get(check.id, 0)
        if seen < check.launches_at_least:
            found.append(f"{check.id} ({seen}, declared at least {check.launches_at_least})")
    return found


def excused(check: str, exceptions: tuple[Expectation, ...]) -> Expectation | None:
    """The declared exception for a check, if there is one."""
    return next((entry for entry in exceptions if entry.check == check), None)


def fulfils(outcome: CheckOutcome, entry: Expectation) -> bool:
    """Whether a check went as its exception says; every failing case must fail as declared."""
    if entry.kind == "skip":
        return outcome.skipped > 0 and not outcome.failed
    return outcome.failed > 0 and all(map(entry.is_meant, outcome.failures))


def found(verdict: Verdict, kind: str, message: str, next_step: str, check: str | None = None) -> Finding:
    """A finding that makes ``verdict`` of its cell."""
    return Finding(kind=kind, message=message, check=check, next_step=next_step, verdict=verdict)


def _no_checks() -> Finding:
    step = "See the cell's output.log for what stopped it."
    return found(Verdict.UNPROVEN, "no-checks", "the suite ran no check at all", step)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _last_error(output: str) -> str:
    """The last line that pytest marks as an error, else the last line."""
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines)[-1]


def _signal(number: int) -> str:
    """A signal's name; those without one, real-time signals among them, by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()][-_TAIL_LINES:]
    return "\n" + "\n".join(lines) if lines else ""
