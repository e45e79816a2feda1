"""Reading the suite's log: aggregation of cases, and no proof in a log that was cut."""

import json

import harness_builders as build
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.matrix.inventory import check_of
from mcore_compat.run.report_log import parse

WHOLE = "\n".join(build.log_lines()) + "\n"


@given(st.integers(0, len(WHOLE) - 2))
def test_a_log_that_was_cut_anywhere_is_incomplete(length):
    assert parse(WHOLE.splitlines()).complete
    assert not parse(WHOLE[:length].splitlines()).complete


@given(st.lists(st.sampled_from(["passed", "failed", "skipped"]), min_size=1, max_size=6))
def test_cases_of_one_check_count_together(outcomes):
    lines = [build.entry("t.py::test_x", outcome, parameter=f"[{i}-a::b]") for i, outcome in enumerate(outcomes)]
    (check,) = parse(lines).checks.values()
    assert (check.passed, check.failed, check.skipped) == tuple(
        outcomes.count(kind) for kind in ("passed", "failed", "skipped")
    )
    worst = "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "skipped"
    assert check.outcome == worst


def test_a_failing_teardown_fails_the_case_that_passed():
    lines = [build.entry("t.py::test_x"), build.entry("t.py::test_x", "failed", "teardown", message="left behind")]
    check = parse(lines).checks["t.py::test_x"]
    assert (check.passed, check.failed, check.message) == (0, 1, "left behind")


def test_an_expected_failure_marked_inside_the_suite_is_a_skip_with_its_reason():
    marked = json.loads(build.entry("t.py::test_x", "skipped")) | {"wasxfail": "known"}
    check = parse([json.dumps(marked)]).checks["t.py::test_x"]
    assert (check.outcome, check.message) == ("skipped", "known")


def test_the_message_is_the_failure_and_not_the_code():
    longrepr = {
        "reprtraceback": {
            "reprentries": [
                {"data": {"lines": ["    def test():", ">       assert f(1) == 2", "E       assert 1 == 2"]}},
                {"data": {"lines": ["    code", "E       ValueError: bad", "E       Falsifying example: test(x=1)"]}},
            ]
        },
        "reprcrash": {"message": "unused"},
    }
    line = json.loads(build.entry("t.py::test_x", "failed")) | {"longrepr": longrepr}
    assert parse([json.dumps(line)]).checks["t.py::test_x"].message == (
        "ValueError: bad\nFalsifying example: test(x=1)"
    )


def test_long_messages_are_cut_with_a_count():
    line = json.loads(build.entry("t.py::test_x", "failed"))
    line["longrepr"] = "\n".join(f"E   {number}" for number in range(100))
    lines = parse([json.dumps(line)]).checks["t.py::test_x"].message.splitlines()
    assert lines[-1] == "… 76 more lines"
    assert len(lines) == 25


def test_a_file_that_cannot_be_imported_is_named():
    line = {"$report_type": "CollectReport", "nodeid": "t.py", "outcome": "failed", "longrepr": "E   ImportError: x"}
    assert parse([json.dumps(line)]).collection_errors == {"t.py": "ImportError: x"}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=30))
def test_any_parameter_belongs_to_its_check(parameter):
    assert check_of(f"sub/t.py::TestX::test_y[{parameter}]") == "sub/t.py::TestX::test_y"


def _crashed(*lines):
    data = {"lines": list(lines), "reprfileloc": {"path": "verl/kernels.py", "lineno": 7, "message": "AssertionError"}}
    entry = json.loads(build.entry("t.py::test_x", "failed"))
    entry["longrepr"] = {"reprtraceback": {"reprentries": [{"data": data}]}, "reprcrash": {"message": "AssertionError"}}
    return parse([json.dumps(entry)]).checks["t.py::test_x"].message


def test_a_bare_assert_of_another_project_is_told_by_its_code():
    bare = _crashed("    def f(x):", ">       assert x.is_cuda", "E       AssertionError")
    assert bare == "AssertionError: assert x.is_cuda\nin verl/kernels.py:7"


def test_an_error_with_words_is_told_by_its_words():
    told = _crashed(">       assert x, 'no x'", "E       AssertionError: no x", "E       assert 0")
    assert told == "AssertionError: no x\nassert 0"
    assert _crashed("E       AssertionError") == "AssertionError"
