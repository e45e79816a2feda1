"""The judge: one true cell is green, and every planted fault of it is not."""

import datetime as dt
import json
from dataclasses import replace

import harness_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.judge.cell import judge_cell, judge_expectations
from mcore_compat.records import Provisioned
from mcore_compat.results import Evidence
from mcore_compat.verdicts import ExitCode, Verdict, exit_code, worst

ONE, TWO, THREE = build.CHECKS


def judged(run=None, *, cell=None, provisioned=None, inventory=None, expectations=None):
    return judge_cell(
        cell or build.cell(),
        provisioned or build.provisioned(),
        run or build.suite_run(),
        inventory or build.inventory(),
        expectations or build.expectations(),
        build.TODAY,
    )


def kinds(result):
    return {finding.kind for finding in result.findings}


def test_a_true_cell_is_ok():
    result = judged()
    assert result.verdict is Verdict.OK
    assert result.findings == ()
    assert (result.checks.planned, result.checks.passed, result.checks.failed, result.checks.skipped) == (3, 3, 0, 0)
    assert result.megatron_core.origin == build.ORIGIN


def facts_run(**changes):
    return build.suite_run(facts=build.suite_facts(**changes))


def megatron(**changes):
    return {"distribution": "0.18.2", "attribute": "0.18.2", "origin": build.ORIGIN} | changes


UNPROVEN = {
    "collects nothing": build.suite_run(build.log_lines(checks=(), exit_status=5), facts=build.suite_facts(checks=())),
    "all skipped": build.suite_run(build.log_lines(outcomes=dict.fromkeys(build.CHECKS, "skipped"))),
    "one skipped": build.suite_run(build.log_lines(outcomes={TWO: "skipped"})),
    "one case of many skipped": build.suite_run(
        [*build.log_lines()[:-1], build.entry(ONE, "skipped", parameter="[x]"), build.log_lines()[-1]],
        facts=build.suite_facts(checks=(*build.CHECKS, f"{ONE}[x]")),
    ),
    "only the setup ran": build.suite_run(
        [line for line in build.log_lines() if '"when": "call"' not in line or ONE not in line]
    ),
    "one check gone": build.suite_run(build.log_lines(checks=(ONE, TWO)), facts=build.suite_facts(checks=(ONE, TWO))),
    "one check more": build.suite_run(
        build.log_lines(checks=(*build.CHECKS, "test_b.py::test_new")),
        facts=build.suite_facts(checks=(*build.CHECKS, "test_b.py::test_new")),
    ),
    "log without its end": build.suite_run(build.log_lines()[:-1], finished=build.finished()),
    "log cut in a line": build.suite_run([*build.log_lines()[:-1], build.log_lines()[-1][:20]]),
    "log empty": build.suite_run([], finished=build.finished()),
    "facts missing": build.suite_run(facts=None, facts_problem="the suite wrote no facts.json"),
    "facts incomplete": facts_run(complete=False),
    "collected more than reported": facts_run(checks=(*build.CHECKS, "test_b.py::test_lost")),
    "no evidence of the hook": facts_run(evidence=Evidence(deferred_head_calls=2, kernel_launches=9)),
    "no kernel ran": facts_run(evidence=Evidence(hook_calls=3)),
    "evidence faked, subject never imported": build.suite_run(
        origins=(build.origins(modules={"megatron": 190, "mcore_fused": 0}),)
    ),
    "megatron never imported": build.suite_run(origins=(build.origins(modules={"megatron": 0, "mcore_fused": 9}),)),
    "plugin did not run": build.suite_run(origins=()),
    "mode unknown": facts_run(mode=None),
    "killed after the limit": build.suite_run(finished=build.finished(-15, timed_out=True, seconds=600.0)),
    "died of a signal": build.suite_run(build.log_lines()[:5], finished=build.finished(-11)),
    "exit status against the log": build.suite_run(finished=build.finished(1)),
    "says 1 without a failure": build.suite_run(build.log_lines(exit_status=1)),
}


def test_a_suite_that_does_not_start_says_why():
    output = "ImportError while loading conftest\nE   SyntaxError: bad\nE   ImportError: no megatron\n"
    run = build.suite_run(build.log_lines(checks=())[:-1], finished=build.finished(4, output=output), facts=None)
    assert judged(run).reason.startswith("the suite did not start: ImportError: no megatron")


@pytest.mark.parametrize("fault", UNPROVEN)
def test_what_proves_nothing_is_unproven(fault):
    assert judged(UNPROVEN[fault]).verdict is Verdict.UNPROVEN


BREAK = {
    "a check fails": build.suite_run(build.log_lines(outcomes={ONE: "failed"}, messages={ONE: "assert 1 == 2"})),
    "a setup fails": build.suite_run(
        [*build.log_lines()[:-1], build.entry(ONE, "failed", "setup"), build.log_lines(exit_status=1)[-1]]
    ),
    "a file cannot be imported": build.suite_run(
        [
            json.dumps(
                {"$report_type": "CollectReport", "nodeid": "test_c.py", "outcome": "failed", "longrepr": "E x"}
            ),
            *build.log_lines(exit_status=1),
        ]
    ),
    "the wrong mode": facts_run(mode="legacy"),
    "a failure that the exit status hides": build.suite_run(build.log_lines(outcomes={ONE: "failed"}, exit_status=0)),
    "a failure and then a crash": build.suite_run(
        build.log_lines(outcomes={ONE: "failed"})[:5], finished=build.finished(-11)
    ),
}


@pytest.mark.parametrize("fault", BREAK)
def test_what_fails_is_a_break(fault):
    assert judged(BREAK[fault]).verdict is Verdict.BREAK


INFRA = {
    "another megatron-core": facts_run(version="0.17.1"),
    "attribute of another": facts_run(megatron_core=megatron(attribute="0.19.0")),
    "imported from a checkout": facts_run(megatron_core=megatron(origin="outside: __init__.py")),
    "another torch": facts_run(torch="2.12.0"),
    "another numpy": facts_run(numpy="1.26.4"),
    "a module from elsewhere": build.suite_run(origins=(build.origins(foreign={"megatron.training": "/x/y.py"}),)),
}


@pytest.mark.parametrize("fault", INFRA)
def test_the_wrong_environment_is_infra_even_when_checks_fail(fault):
    run = INFRA[fault]
    assert judged(run).verdict is Verdict.INFRA
    failing = build.suite_run(build.log_lines(outcomes={ONE: "failed"}), facts=run.facts, origins=run.origins)
    assert judged(failing).verdict is Verdict.INFRA


def test_a_gpu_cell_on_a_cpu_is_unproven():
    gpu = build.cell(lane="gpu")
    assert judged(cell=gpu).verdict is Verdict.UNPROVEN
    assert judged(facts_run(device="NVIDIA H200"), cell=gpu).verdict is Verdict.OK


@pytest.mark.parametrize("verdict", [Verdict.UNRESOLVABLE, Verdict.INFRA])
def test_a_cell_without_environment_keeps_its_verdict_and_reason(verdict):
    failed = Provisioned(3.0, None, verdict, "numpy conflicts", "change it")
    result = judge_cell(build.cell(), failed, None, build.inventory(), build.expectations(), build.TODAY)
    assert (result.verdict, result.reason, result.checks.planned) == (verdict, "numpy conflicts", 3)


def test_the_reason_names_the_check_and_counts_the_rest():
    run = build.suite_run(build.log_lines(outcomes={ONE: "failed", TWO: "failed"}, messages={ONE: "assert 1 == 2"}))
    assert judged(run).reason == "test_one: assert 1 == 2 (+1 more)"


class TestExpectations:
    failing = build.suite_run(build.log_lines(outcomes={ONE: "failed"}))

    def test_an_expected_failure_is_green(self):
        result = judged(self.failing, expectations=build.expectations(build.expectation()))
        assert result.verdict is Verdict.OK
        assert [check.expected for check in result.results] == [True, True, True]
        assert result.reason == "as declared in expectations.toml: test_one"

    @pytest.mark.parametrize(
        ("kind", "outcome", "words"), [("fail", "failed", "fails"), ("skip", "skipped", "is skipped")]
    )
    def test_a_reader_learns_why_it_is_green(self, kind, outcome, words):
        entry = build.expectation(kind=kind)
        run = build.suite_run(build.log_lines(outcomes={ONE: outcome}))
        (note,) = judged(run, expectations=build.expectations(entry)).findings
        assert (note.kind, note.check, note.verdict, note.link) == ("as-declared", ONE, None, entry.link)
        assert note.message == f"{words} as declared: {entry.reason}"
        assert str(entry.expires) in note.next_step

    def test_a_red_cell_gives_the_reason_of_its_colour(self):
        both = build.suite_run(build.log_lines(outcomes={ONE: "failed", TWO: "failed"}, messages={TWO: "no"}))
        result = judged(both, expectations=build.expectations(build.expectation()))
        assert (result.verdict, result.reason) == (Verdict.BREAK, "test_two: no")

    def test_another_failure_than_the_declared_one_is_a_break(self):
        """A declared TypeError must not hide a wrong number."""
        wrong = build.suite_run(build.log_lines(outcomes={ONE: "failed"}, messages={ONE: "log_probs differs by 2.35"}))
        result = judged(wrong, expectations=build.expectations(build.expectation()))
        assert result.verdict is Verdict.BREAK
        (finding,) = result.findings
        assert (finding.kind, finding.message) == ("failed-check", "log_probs differs by 2.35")
        assert "Declared is another failure" in finding.next_step
        assert [check.expected for check in result.results] == [False, True, True]

    def test_every_failing_case_must_be_the_declared_one(self):
        run = build.suite_run(build.log_lines(outcomes={ONE: "failed"}))
        outcome = run.log.checks[ONE]
        assert outcome.failures == (outcome.message,)
        both = replace(outcome, failed=2, failures=("assert 1 == 2", "log_probs differs"))
        mixed = replace(run, log=replace(run.log, checks={**run.log.checks, ONE: both}))
        result = judged(mixed, expectations=build.expectations(build.expectation()))
        assert [finding.message for finding in result.findings] == ["log_probs differs"]

    def test_of_another_cell_does_not_help(self):
        other = build.expectations(build.expectation(cell="0.17.*"))
        assert judged(self.failing, expectations=other).verdict is Verdict.BREAK

    @pytest.mark.parametrize("days", [0, -1])
    def test_expired_is_red_even_when_it_holds(self, days):
        expired = build.expectation(expires=build.TODAY + dt.timedelta(days=days))
        result = judged(self.failing, expectations=build.expectations(expired))
        assert (result.verdict, kinds(result)) == (Verdict.BREAK, {"expectation-stale"})

    def test_no_longer_failing_is_red(self):
        assert kinds(judged(expectations=build.expectations(build.expectation()))) == {"expectation-stale"}

    def test_an_expected_skip(self):
        skip = build.expectations(build.expectation(kind="skip"))
        skipped = build.suite_run(build.log_lines(outcomes={ONE: "skipped"}))
        assert judged(skipped, expectations=skip).verdict is Verdict.OK
        assert judged(expectations=skip).verdict is Verdict.BREAK
        assert judged(self.failing, expectations=skip).verdict is Verdict.BREAK

    def test_a_failure_that_is_only_allowed_to_be_skipped_is_a_break(self):
        skip = build.expectations(build.expectation(kind="skip"))
        assert "failed-check" in kinds(judged(self.failing, expectations=skip))

    def test_unused_ones_are_found_over_all_cells(self):
        matrix = (build.cell(), build.cell("0.17.1"))
        results = [judged()]
        nowhere = build.expectations(build.expectation(cell="9.*"))
        no_check = build.expectations(build.expectation(check="test_a.py::test_gone"))
        not_run = build.expectations(build.expectation(cell="0.17.1"))
        assert len(judge_expectations(nowhere, matrix, results)) == 1
        assert len(judge_expectations(no_check, matrix, results)) == 1
        assert judge_expectations(not_run, matrix, results) == ()
        assert judge_expectations(build.expectations(build.expectation()), matrix, results) == ()


@given(st.lists(st.sampled_from(list(Verdict)), max_size=8))
def test_a_run_is_green_only_if_every_cell_is(verdicts):
    green = exit_code(worst(verdicts)) is ExitCode.GREEN
    assert green == (bool(verdicts) and all(verdict.green for verdict in verdicts))
    if Verdict.BREAK in verdicts:
        assert exit_code(worst(verdicts)) is ExitCode.BREAK


@given(
    outcomes=st.dictionaries(st.sampled_from(build.CHECKS), st.sampled_from(["passed", "failed", "skipped"])),
    declared=st.sets(st.sampled_from([*build.CHECKS, "test_b.py::test_four"]), min_size=1),
    kept=st.sets(st.sampled_from(build.CHECKS)),
)
def test_green_means_that_exactly_the_declared_checks_passed(outcomes, declared, kept):
    ran = tuple(check for check in build.CHECKS if check in kept)
    used = {check: outcome for check, outcome in outcomes.items() if check in kept}
    run = build.suite_run(build.log_lines(ran, used), facts=build.suite_facts(checks=ran))
    result = judged(run, inventory=build.inventory(tuple(sorted(declared))))
    passed = {check for check in ran if used.get(check, "passed") == "passed"}
    # An undeclared check that is skipped ran nothing, so it is neither proof nor fault.
    failed = {check for check in ran if used.get(check) == "failed"}
    assert result.verdict.green == (passed == declared and not failed)
