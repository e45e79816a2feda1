"""What mutation testing of the judge found unlooked at: exit codes, several exceptions at once, what a finding says."""

import dataclasses
import datetime as dt

import harness_builders as build
import pytest

from mcore_compat.judge.cell import judge_cell, judge_expectations
from mcore_compat.matrix.inventory import Inventory, derive, load_inventory, write_text
from mcore_compat.records import Provisioned
from mcore_compat.verdicts import ExitCode, Verdict, exit_code

ONE, TWO, THREE = build.CHECKS


def judged(run=None, *, cell=None, expectations=None, inventory=None):
    return judge_cell(
        cell or build.cell(),
        build.provisioned(),
        run or build.suite_run(),
        inventory or build.inventory(),
        expectations or build.expectations(),
        build.TODAY,
    )


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.OK, ExitCode.GREEN),
        (Verdict.DRIFT, ExitCode.GREEN),
        (Verdict.BREAK, ExitCode.BREAK),
        (Verdict.UNPROVEN, ExitCode.COULD_NOT_JUDGE),
        (Verdict.INFRA, ExitCode.COULD_NOT_JUDGE),
        (Verdict.UNRESOLVABLE, ExitCode.COULD_NOT_JUDGE),
    ],
)
def test_only_a_break_ends_with_the_code_of_a_break(verdict, code):
    """A pipeline retries a host that failed; it must not retry, nor excuse, a broken release."""
    assert exit_code(verdict) is code


def test_a_source_build_must_be_the_one_that_was_installed():
    candidate = build.cell(source="git+file:///x@main", megatron_core="main")
    result = judged(build.suite_run(facts=build.suite_facts(version="0.19.0")), cell=candidate)
    assert result.verdict is Verdict.INFRA
    (finding,) = [finding for finding in result.findings if "0.18.2 was installed" in finding.message]
    assert finding.kind == "wrong-version"


def test_an_exception_for_a_check_of_other_cells_is_not_stale_here():
    """A pattern may cover cells that do not have the check; entries after it still count."""
    elsewhere = build.expectation(check="test_z.py::test_of_other_cells")
    expired = build.expectation(check="test_z.py::test_gone_too", expires=build.TODAY - dt.timedelta(days=1))
    holding = build.expectation()
    failing = build.suite_run(build.log_lines(outcomes={ONE: "failed"}))
    assert judged(failing, expectations=build.expectations(elsewhere, expired, holding)).verdict is Verdict.OK
    stale = judged(expectations=build.expectations(elsewhere, build.expectation(check=TWO), holding))
    assert [finding.check for finding in stale.findings] == [TWO, ONE]
    assert {finding.next_step for finding in stale.findings} == {"Remove the entry."}
    assert all("is stale" in finding.message for finding in stale.findings)


def test_a_declared_check_that_did_not_run_is_not_called_stale():
    run = build.suite_run(build.log_lines(checks=(TWO, THREE)), facts=build.suite_facts(checks=(TWO, THREE)))
    result = judged(run, expectations=build.expectations(build.expectation()))
    assert [finding.kind for finding in result.findings] == ["missing-check"]


def test_an_expired_exception_is_told_though_its_check_did_not_run_and_though_others_hold():
    expired = build.expectation(check=THREE, expires=build.TODAY)
    holding, stale = build.expectation(), build.expectation(check=TWO)
    run = build.suite_run(
        build.log_lines(checks=(ONE, TWO), outcomes={ONE: "failed"}), facts=build.suite_facts(checks=(ONE, TWO))
    )
    findings = judged(run, expectations=build.expectations(holding, expired, stale)).findings
    assert [(finding.kind, finding.check, finding.next_step) for finding in findings] == [
        ("expectation-stale", THREE, "Look again: fix the cause, or renew with a reason."),
        ("expectation-stale", TWO, "Remove the entry."),
        ("missing-check", None, "Make them run, or change inventory.toml."),
        ("as-declared", ONE, "None until 2026-12-30; a check that goes otherwise turns the run red."),
    ]


def test_the_worst_finding_comes_first():
    run = build.suite_run(
        build.log_lines(checks=(ONE, TWO), outcomes={ONE: "failed"}),
        facts=build.suite_facts(checks=(ONE, TWO), torch="2.12.0"),
    )
    verdicts = [finding.verdict for finding in judged(run).findings]
    assert verdicts == [Verdict.INFRA, Verdict.BREAK, Verdict.UNPROVEN]


def test_many_checks_are_listed_up_to_four_with_a_count():
    names = tuple(f"test_m.py::test_{letter}" for letter in "abcdef")
    messages = [finding.message for finding in judged(inventory=build.inventory((*build.CHECKS, *names))).findings]
    assert messages == [
        f"6 declared checks did not run: {', '.join(names[:4])} and 2 more",
    ]
    (exactly_four,) = judged(inventory=build.inventory((*build.CHECKS, *names[:4]))).findings
    assert exactly_four.message.endswith("test_m.py::test_d")


def test_a_failed_check_says_how_to_run_it_again():
    run = build.suite_run(build.log_lines(outcomes={ONE: "failed"}, messages={ONE: "assert 1 == 2"}))
    result = judge_cell(
        build.cell(), build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY,
        rerun=lambda check: f"Type: {check}.",
    )  # fmt: skip
    (finding,) = result.findings
    assert (finding.check, finding.message, finding.next_step) == (ONE, "assert 1 == 2", f"Type: {ONE}.")


def test_the_end_of_the_output_is_kept():
    lines = [f"line {number}" for number in range(20)]
    run = build.suite_run(build.log_lines()[:5], finished=build.finished(-11, output="\n".join(lines)))
    (crash,) = [finding for finding in judged(run).findings if finding.kind == "crash"]
    assert crash.message.splitlines()[1:] == lines[-6:]
    silent = build.suite_run(build.log_lines()[:5], finished=build.finished(-11, output=""))
    (crash,) = [finding for finding in judged(silent).findings if finding.kind == "crash"]
    assert crash.message == "the suite's process died of SIGSEGV"


def test_results_keep_cases_seconds_and_messages():
    run = build.suite_run(
        [*build.log_lines(outcomes={ONE: "failed"}, messages={ONE: "assert 1 == 2"})[:-1],
         build.entry(ONE, "passed", parameter="[x]"), build.log_lines(exit_status=1)[-1]],
        facts=build.suite_facts(checks=(*build.CHECKS, f"{ONE}[x]")),
    )  # fmt: skip
    one, two, _ = judged(run).results
    assert (one.check, one.outcome, one.expected, one.cases, one.message) == (ONE, "failed", False, 2, "assert 1 == 2")
    assert (two.outcome, two.expected, two.cases, two.seconds) == ("passed", True, 1, 0.75)


def test_a_cell_without_environment_keeps_its_time_and_next_step():
    failed = Provisioned(3.14, None, Verdict.UNRESOLVABLE, "numpy conflicts", "change it")
    result = judge_cell(build.cell(), failed, None, build.inventory(), build.expectations(), build.TODAY)
    assert result.seconds.provision == 3.1
    (finding,) = result.findings
    assert (finding.kind, finding.verdict) == ("cell-unresolvable", Verdict.UNRESOLVABLE)
    assert (finding.message, finding.next_step) == ("numpy conflicts", "change it")


def test_an_unused_exception_is_named_with_its_remedy():
    matrix = (build.cell(),)
    (nowhere,) = judge_expectations(build.expectations(build.expectation(cell="9.*")), matrix, [judged()])
    assert (nowhere.kind, nowhere.verdict, nowhere.check) == ("expectation-unused", Verdict.BREAK, ONE)
    assert "names no cell" in nowhere.message
    assert nowhere.next_step == "Remove the entry."
    gone = build.expectation(check="test_a.py::test_gone")
    (unrun,) = judge_expectations(build.expectations(gone), matrix, [judged()])
    assert (unrun.kind, unrun.verdict, unrun.check) == ("expectation-unused", Verdict.BREAK, gone.check)
    assert "none of its 1 cells" in unrun.message
    assert unrun.next_step == "Remove the entry, or correct the check's name."


def test_a_declared_failure_does_not_hide_a_skip():
    """One case fails as declared, another is skipped: what is not run proves nothing."""
    lines = build.log_lines(outcomes={ONE: "failed"})
    lines[-1:-1] = [build.entry(ONE, "skipped", parameter="[x]")]
    facts = build.suite_facts(checks=(*build.CHECKS, f"{ONE}[x]"))
    result = judged(build.suite_run(lines, facts=facts), expectations=build.expectations(build.expectation()))
    assert result.verdict is Verdict.UNPROVEN
    assert "skipped-check" in {finding.kind for finding in result.findings}


def test_what_is_told_of_an_environment_decides_nothing():
    made = build.provisioned(plugins={"megatron-core": ("soften = mcore_ci",)})
    made = dataclasses.replace(made, environment=dataclasses.replace(made.environment, remade="torch was edited"))
    result = judge_cell(build.cell(), made, build.suite_run(), build.inventory(), build.expectations(), build.TODAY)
    assert result.verdict is Verdict.OK
    told = {finding.kind: finding.message for finding in result.findings}
    assert told.keys() == {"environment-remade", "candidate-plugin"}
    assert "torch was edited" in told["environment-remade"]
    assert "soften = mcore_ci" in told["candidate-plugin"]


def declared(**changes):
    fields = {"schema_version": 1, "check": [{"id": check} for check in build.CHECKS]}
    return Inventory.model_validate(fields | changes)


def controlled(**controls):
    return build.suite_run(facts=build.suite_facts(controls=controls))


def test_controls_that_fail_are_as_they_should_be():
    assert judged(controlled(wrong_scale="failed"), inventory=declared(controls=["wrong_scale"])).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (controlled(wrong_scale="passed"), "control-passed"),
        (controlled(wrong_scale="failed", wrong_entropy="passed"), "control-passed"),
        (controlled(), "control-missing"),
        (controlled(wrong_entropy="failed"), "control-missing"),
    ],
)
def test_a_control_that_passes_or_is_missing_leaves_the_cell_unproven(run, kind):
    result = judged(run, inventory=declared(controls=["wrong_scale"]))
    assert (result.verdict, [finding.kind for finding in result.findings]) == (Verdict.UNPROVEN, [kind])


def test_a_control_that_passes_counts_where_none_is_declared():
    assert judged(controlled(wrong_scale="passed")).verdict is Verdict.UNPROVEN


def with_cases(count):
    lines = build.log_lines()
    lines[-1:-1] = [build.entry(ONE, parameter=f"[{number}]") for number in range(count - 1)]
    checks = (*build.CHECKS, *(f"{ONE}[{number}]" for number in range(count - 1)))
    return build.suite_run(lines, facts=build.suite_facts(checks=checks))


@pytest.mark.parametrize(
    ("rule", "count", "right"),
    [
        ({"cases": 4}, 4, True),
        ({"cases": 4}, 2, False),
        ({"cases": 4}, 5, False),
        ({"cases_at_least": 4}, 5, True),
        ({"cases_at_least": 4}, 3, False),
        ({"cases": 4, "until": "0.17"}, 2, True),
    ],
)
def test_the_cases_of_a_check_are_counted(rule, count, right):
    checks = [{"id": ONE}, {"id": TWO}, {"id": THREE}]
    checks[0] |= rule
    if "until" in rule:
        checks.append({"id": "test_a.py::test_other"})
    result = judged(with_cases(count), inventory=declared(check=checks))
    assert ("case-count" not in {finding.kind for finding in result.findings}) is right


@pytest.mark.parametrize(("count", "right"), [(3, True), (4, False)])
def test_evidence_is_compared_with_that_of_a_whole_run(count, right):
    inventory = declared(evidence={"least": {"hook_calls": count, "deferred_head_calls": 999}})
    result = judged(inventory=inventory)
    assert (result.verdict is Verdict.OK) is right
    assert right or "hook_calls (3, declared at least 4)" in result.reason


@pytest.mark.parametrize(
    ("seen", "outcome", "right"),
    [({ONE: 5}, "passed", True), ({ONE: 4}, "passed", False), ({TWO: 5}, "passed", False), ({}, "failed", True)],
)
def test_the_launches_of_each_check_are_compared(seen, outcome, right):
    """A check that tries fewer examples has the same cases, and the whole run enough launches."""
    inventory = declared(check=[{"id": ONE, "launches_at_least": 5}, {"id": TWO}, {"id": THREE}])
    run = build.suite_run(build.log_lines(outcomes={ONE: outcome}), facts=build.suite_facts(launches=seen))
    result = judged(run=run, inventory=inventory)
    assert [f.kind for f in result.findings if f.kind == "no-evidence"] == ([] if right else ["no-evidence"])
    assert right or f"{ONE} ({seen.get(ONE, 0)}, declared at least 5)" in result.reason
    assert {r.check: r.launches for r in result.results} == {check: seen.get(check, 0) for check in build.CHECKS}


def test_launches_are_not_expected_of_another_subject_or_another_cell():
    checks = [{"id": ONE, "launches_at_least": 5, "until": "0.18.0"}, {"id": ONE.replace("one", "two")}, {"id": THREE}]
    run = build.suite_run(facts=build.suite_facts(launches={}))
    assert "no-evidence" not in {f.kind for f in judged(run=run, inventory=declared(check=checks)).findings}


def test_launches_are_derived_as_lower_bounds():
    cells = [build.cell("0.17.1"), build.cell("0.18.2")]
    ran = {"0.17.1": {ONE: 4, TWO: 2}, "0.18.2": {ONE: 4, TWO: 6, THREE: 1}}
    counted = {"0.17.1": {ONE: 8, TWO: 2}, "0.18.2": {ONE: 9, THREE: 40}}
    first = derive(ran, cells, None, counted)
    assert {check.id: check.launches_at_least for check in first.check} == {ONE: 8, TWO: None, THREE: 36}
    # What is not known again stays as it was declared.
    assert derive(ran, cells, first) == first


def test_an_inventory_with_counts_is_written_and_read_back(tmp_path):
    written = declared(
        controls=["wrong_scale"],
        evidence={"least": {"hook_calls": 7}},
        check=[{"id": ONE, "cases": 4, "launches_at_least": 9}, {"id": TWO, "cases_at_least": 2}, {"id": THREE}],
    )
    (tmp_path / "inventory.toml").write_text(write_text(written), encoding="utf-8")
    assert load_inventory(tmp_path / "inventory.toml") == written


def test_counts_are_derived_from_what_ran():
    cells = [build.cell("0.17.1"), build.cell("0.18.2")]
    ran = {"0.17.1": {ONE: 4, TWO: 2}, "0.18.2": {ONE: 4, TWO: 6, THREE: 1}}
    checks = {check.id: check for check in derive(ran, cells, None).check}
    assert [(checks[check].cases, checks[check].cases_at_least) for check in build.CHECKS] == [
        (4, None),
        (None, 2),
        (1, None),
    ]
    again = derive({"0.17.1": [ONE, TWO], "0.18.2": [ONE, TWO, THREE]}, cells, derive(ran, cells, None))
    assert again == derive(ran, cells, None)
