"""What the judge says: the kind of every finding (SARIF rules and filters rest on it), its sentence, its next step."""

import json
from dataclasses import replace

import harness_builders as build
import pytest

from mcore_compat.judge.cell import judge_cell
from mcore_compat.results import CheckResult, Evidence, MegatronCore, Seconds
from mcore_compat.verdicts import Verdict

ONE, TWO, THREE = build.CHECKS
OUTPUT = "Read the cell's output.log and run it again."
FRESH = "Remove the cell's folder below the cells directory and run again."
SEE_IT_RUN = "Something switched the fused path off, or the suite never reached it; a green run needs to see it run."


def judged(run=None, *, cell=None, provisioned=None, drift=()):
    return judge_cell(
        cell or build.cell(),
        provisioned or build.provisioned(),
        run or build.suite_run(),
        build.inventory(),
        build.expectations(),
        build.TODAY,
        drift,
    )


def told(run, **more):
    return [(finding.kind, finding.message, finding.next_step) for finding in judged(run, **more).findings]


def facts_run(**changes):
    return build.suite_run(facts=build.suite_facts(**changes))


def megatron(**changes):
    return {"distribution": "0.18.2", "attribute": "0.18.2", "origin": build.ORIGIN} | changes


NOTHING_RAN = ("no-checks", "the suite ran no check at all", "See the cell's output.log for what stopped it.")
CASES = {
    "killed at its limit": (
        build.suite_run(finished=build.finished(-15, timed_out=True, seconds=600.2, output="slow")),
        [
            (
                "time-limit",
                "the suite was killed after 600 s\nslow",
                "Find the check that hangs, or raise the cell's time_limit_s with a reason.",
            )
        ],
    ),
    "did not start": (
        build.suite_run(
            build.log_lines(checks=())[:-1],
            finished=build.finished(4, output="usage\nE   SyntaxError: bad"),
            facts=build.suite_facts(checks=()),
        ),
        [
            ("no-start", "the suite did not start: SyntaxError: bad\nusage\nE   SyntaxError: bad", OUTPUT),
            NOTHING_RAN,
        ],
    ),
    "did not start, in silence": (
        build.suite_run(
            build.log_lines(checks=())[:-1],
            finished=build.finished(1, output=" \n"),
            facts=build.suite_facts(checks=()),
        ),
        [("no-start", "the suite did not start: no output", OUTPUT), NOTHING_RAN],
    ),
    "did not start, without an error line": (
        build.suite_run(
            build.log_lines(checks=())[:-1],
            finished=build.finished(1, output="one\ntwo"),
            facts=build.suite_facts(checks=()),
        ),
        [("no-start", "the suite did not start: two\none\ntwo", OUTPUT), NOTHING_RAN],
    ),
    "collected nothing": (
        build.suite_run(build.log_lines(checks=(), exit_status=5), facts=build.suite_facts(checks=())),
        [
            ("exit-status", "pytest ended with status 5, which its log does not explain\n3 passed", OUTPUT),
            NOTHING_RAN,
        ],
    ),
    "selected nothing and says 0": (
        build.suite_run(build.log_lines(checks=()), facts=build.suite_facts(checks=())),
        [NOTHING_RAN],
    ),
    "log without its end": (
        build.suite_run(build.log_lines()[:-1], finished=build.finished()),
        [("incomplete-log", "the report log is incomplete: its last record is missing\n3 passed", OUTPUT)],
    ),
    "log cut in a line": (
        build.suite_run([*build.log_lines()[:-1], build.log_lines()[-1][:20]]),
        [("incomplete-log", "the report log is incomplete: line 11 cannot be read\n3 passed", OUTPUT)],
    ),
    "an exit status that nothing explains": (
        build.suite_run(finished=build.finished(1)),
        [("exit-status", "pytest ended with status 1, which its log does not explain\n3 passed", OUTPUT)],
    ),
    "no facts": (
        build.suite_run(facts=None, facts_problem="the suite wrote no facts.json"),
        [("no-facts", "the suite wrote no facts.json", OUTPUT)],
    ),
    "facts of the start only": (
        facts_run(complete=False),
        [("incomplete-facts", "the suite did not come to the end of its session", OUTPUT)],
    ),
    "collected and not reported": (
        facts_run(checks=(*build.CHECKS, "test_b.py::test_lost")),
        [("count-mismatch", "collected and reported differ in test_b.py::test_lost", OUTPUT)],
    ),
    "skipped for three reasons": (
        build.suite_run(
            build.log_lines(
                outcomes=dict.fromkeys(build.CHECKS, "skipped"),
                messages={ONE: "c: no GPU\nat line 3", TWO: "a: no net", THREE: "b: old"},
            )
        ),
        [
            (
                "skipped-check",
                f"3 declared checks were skipped, in whole or in part: {', '.join(build.CHECKS)} (a: no net; b: old)",
                "Make them run, or declare the skip in expectations.toml.",
            )
        ],
    ),
    "skipped without a reason": (
        build.suite_run(build.log_lines(outcomes={TWO: "skipped"})),
        [
            (
                "skipped-check",
                f"1 declared checks were skipped, in whole or in part: {TWO}",
                "Make them run, or declare the skip in expectations.toml.",
            )
        ],
    ),
    "a check less": (
        build.suite_run(build.log_lines(checks=(ONE, TWO)), facts=build.suite_facts(checks=(ONE, TWO))),
        [
            (
                "missing-check",
                f"1 declared checks did not run: {THREE}",
                "Make them run, or change inventory.toml.",
            )
        ],
    ),
    "a check more": (
        build.suite_run(
            build.log_lines(checks=(*build.CHECKS, "test_b.py::test_new")),
            facts=build.suite_facts(checks=(*build.CHECKS, "test_b.py::test_new")),
        ),
        [
            (
                "undeclared-check",
                "1 checks ran that are not declared for this cell: test_b.py::test_new",
                "Declare them: `mcore-compat inventory --write`.",
            )
        ],
    ),
    "nothing counted": (
        facts_run(evidence=Evidence()),
        [("no-evidence", "nothing was counted for kernel_launches, hook_calls", SEE_IT_RUN)],
    ),
    "no mode": (facts_run(mode=None), [("no-evidence", "the suite does not say which mode was used", SEE_IT_RUN)]),
    "megatron not imported": (
        build.suite_run(origins=(build.origins(modules={"mcore_fused": 9}),)),
        [("no-evidence", "no process of the suite imported megatron", SEE_IT_RUN)],
    ),
    "subject not imported": (
        build.suite_run(origins=(build.origins(modules={"megatron": 190}),)),
        [("no-evidence", "no process of the suite imported the subject", SEE_IT_RUN)],
    ),
    "another release": (
        facts_run(version="0.17.1", megatron_core=megatron(distribution="0.17.1")),
        [("wrong-version", "the suite ran megatron-core 0.17.1, not 0.18.2", FRESH)],
    ),
    "says another release": (
        facts_run(megatron_core=megatron(attribute="0.19.0")),
        [("wrong-version", "megatron.core says that it is 0.19.0, not 0.18.2", FRESH)],
    ),
    "from elsewhere": (
        facts_run(megatron_core=megatron(origin="outside: __init__.py")),
        [("wrong-origin", f"megatron.core was imported from outside: __init__.py, not {build.ORIGIN}", FRESH)],
    ),
    "another torch": (
        facts_run(torch="2.12.0"),
        [("wrong-version", "the suite ran torch 2.12.0, 2.11.0 was installed", FRESH)],
    ),
    "another triton": (
        facts_run(triton="3.7.0"),
        [("wrong-version", "the suite ran triton 3.7.0, 3.6.0 was installed", FRESH)],
    ),
    "a module from elsewhere": (
        build.suite_run(origins=(build.origins(foreign={"megatron.training": "/x/y.py"}),)),
        [
            (
                "foreign-module",
                "megatron.training was imported from outside the environment: /x/y.py",
                FRESH,
            )
        ],
    ),
    "another mode": (
        facts_run(mode="legacy"),
        [
            (
                "wrong-mode",
                "the subject chose legacy mode, hook was expected",
                "See mcore_fused.modes.capability; if upstream's hook changed, correct the cell's expected_mode.",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_finding_has_its_kind_its_sentence_and_its_next_step(name):
    run, expected = CASES[name]
    assert told(run) == expected


def test_a_predicted_mode_is_corrected_by_what_ran():
    """The source of a candidate was read as one without the hook, and the hook was called: more than promised."""
    predicted = build.cell(expected_mode="legacy", tags=("predicted",))
    result = judged(build.suite_run(), cell=predicted)
    assert (result.verdict, result.expected_mode) == (Verdict.DRIFT, "hook")
    assert [finding.kind for finding in result.findings] == ["mode-corrected"]
    assert "the hook was called 3 times" in result.reason
    # A cell of the matrix is no prediction; a hook that nobody called is none; and less than promised stays a break.
    assert judged(build.suite_run(), cell=build.cell(expected_mode="legacy")).verdict is Verdict.BREAK
    uncalled = build.suite_facts(evidence=Evidence(deferred_head_calls=2, kernel_launches=9))
    assert judged(build.suite_run(facts=uncalled), cell=predicted).verdict is Verdict.BREAK
    less = build.cell(expected_mode="hook", tags=("predicted",))
    assert judged(facts_run(mode="legacy"), cell=less).verdict is Verdict.BREAK


def test_a_gpu_cell_on_the_cpu():
    assert told(build.suite_run(), cell=build.cell(lane="gpu")) == [
        ("no-evidence", "a GPU cell ran on the CPU", SEE_IT_RUN)
    ]


def test_a_file_that_cannot_be_imported_is_a_check_of_its_own():
    record = {"$report_type": "CollectReport", "nodeid": "test_c.py", "outcome": "failed", "longrepr": "E x"}
    result = judged(build.suite_run([json.dumps(record), *build.log_lines(exit_status=1)]))
    (finding,) = result.findings
    assert (finding.kind, finding.check, finding.verdict) == ("collection-error", "test_c.py", Verdict.BREAK)
    assert finding.message.startswith("test_c.py cannot be imported\n")
    assert "x" in finding.message.splitlines()[1]
    assert finding.next_step == "Run test_c.py again."
    assert result.reason == "test_c.py cannot be imported"


def test_a_file_that_cannot_be_imported_explains_the_exit_status():
    record = {"$report_type": "CollectReport", "nodeid": "test_c.py", "outcome": "failed", "longrepr": "E x"}
    hidden = judged(build.suite_run([json.dumps(record), *build.log_lines(exit_status=0)]))
    assert {finding.kind for finding in hidden.findings} == {"collection-error", "exit-status"}


def test_a_failure_without_a_message_says_so():
    run = build.suite_run(build.log_lines(outcomes={ONE: "failed"}, messages={ONE: ""}))
    (finding,) = judged(run).findings
    assert finding.message == "no message"


def test_the_reason_is_one_line_with_the_check_for_failures_only():
    class_check = "test_a.py::TestX::test_two"
    run = build.suite_run(
        build.log_lines(checks=(class_check,), outcomes={class_check: "failed"}, messages={class_check: "a\nb"}),
        facts=build.suite_facts(checks=(class_check,)),
    )
    assert judged(run).reason == "test_two: a"
    assert judged().reason == ""
    silent = build.finding("", check=None, kind="contract", verdict=None)
    assert judged(drift=(silent,)).reason == "contract"
    assert judged(CASES["a check less"][0]).reason == f"1 declared checks did not run: {THREE}"


def test_what_the_contract_found_makes_a_green_cell_drift():
    moved = build.finding("hook: a keyword more", check=None, kind="contract", verdict=None)
    result = judged(drift=(moved,))
    assert (result.verdict, result.reason) == (Verdict.DRIFT, "hook: a keyword more")
    assert [finding.verdict for finding in result.findings] == [Verdict.DRIFT]


def test_findings_are_in_the_order_of_their_verdicts_and_told_ones_last():
    run = build.suite_run(
        build.log_lines(outcomes={ONE: "failed"}),
        facts=build.suite_facts(torch="2.12.0", complete=False),
    )
    moved = build.finding("moved", check=None, kind="contract", verdict=None)
    verdicts = [finding.verdict for finding in judged(run, drift=(moved,)).findings]
    assert verdicts == [Verdict.INFRA, Verdict.BREAK, Verdict.UNPROVEN, Verdict.DRIFT]


def test_a_proved_environment_without_a_suite_proves_nothing():
    result = judge_cell(build.cell(), build.provisioned(), None, build.inventory(), build.expectations(), build.TODAY)
    assert result.verdict is Verdict.INFRA
    assert [finding.kind for finding in result.findings] == ["cell-infra"]


def test_a_result_says_all_that_is_known_of_the_cell():
    """What was installed and what the suite says of itself, each in its place; the suite's word comes first."""
    said = build.suite_facts(
        megatron_core=megatron(attribute="0.18.2+said"), triton="3.6.0+said", device="cpu", seconds={"imports": 8.17}
    )
    run = build.suite_run(facts=said, finished=build.finished(seconds=30.26))
    proved = replace(build.provisioned(imported=build.imported("0.18.2", attribute="0.18.2+proved")), seconds=1.54)
    result = judged(run, provisioned=proved)
    assert result.megatron_core == MegatronCore(
        requested="0.18.2",
        distribution="0.18.2",
        attribute="0.18.2+said",
        origin=build.ORIGIN,
        sha256="ab" * 32,
    )
    assert (result.python, result.torch, result.triton, result.numpy) == (
        "3.12.1", "2.11.0+cu130", "3.6.0+said", "2.4.6",
    )  # fmt: skip
    assert (result.device, result.mode, result.expected_mode) == ("cpu", "hook", "hook")
    assert (result.lane, result.contract_class) == ("cpu", "0.18+")
    assert result.evidence == Evidence(hook_calls=3, deferred_head_calls=2, kernel_launches=9)
    assert result.seconds == Seconds(provision=1.5, imports=8.2, suite=30.3)
    assert result.results[0] == CheckResult(check=ONE, outcome="passed", seconds=0.75)


def test_the_origin_is_the_one_that_the_suite_imported():
    """The finding says that it is wrong; the record must not hide it behind the right one."""
    result = judged(facts_run(megatron_core=megatron(origin="outside: __init__.py")))
    assert result.megatron_core.origin == "outside: __init__.py"


def test_where_the_suite_says_nothing_the_result_says_what_was_installed():
    result = judged(build.suite_run(facts=None, facts_problem="the suite wrote no facts.json"))
    assert result.megatron_core == MegatronCore(
        requested="0.18.2", distribution="0.18.2", attribute="0.18.2", origin=build.ORIGIN, sha256="ab" * 32
    )
    assert (result.torch, result.triton, result.numpy) == ("2.11.0", "3.6.0", "2.4.6")
    assert (result.device, result.mode, result.evidence) == (None, None, Evidence())
    assert result.seconds == Seconds(provision=1.5, imports=0.0, suite=30.0)


def test_what_was_neither_proved_nor_said_stays_empty():
    nothing = build.provisioned(imported=None, megatron_files=None)
    result = judged(build.suite_run(facts=None, facts_problem="none"), provisioned=nothing)
    assert result.megatron_core == MegatronCore(requested="0.18.2", distribution="0.18.2")
