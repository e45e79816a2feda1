"""Results of the same checkout stand for a control only if every case of a check passed."""

import json

import pytest
from catalogue import Fault
from passed import read_passed, without_passed

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.unit.kernel.test_a" name="test_one[x]"/>
<testcase classname="tests.unit.kernel.test_a" name="test_one[y]">{}</testcase>
<testcase classname="tests.unit.kernel.test_a.TestMachine" name="runTest"/>
</testsuite></testsuites>"""
RESULTS = [
    {"check": "test_b.py::test_two", "outcome": "passed"},
    {"check": "test_b.py::test_three", "outcome": "failed"},
]


def control(place, *checks, env=None):
    return Fault("(nothing planted)", "nothing", "", place, "", (), checks, env=env or {})


def left(tmp_path, what, *, bad=""):
    (tmp_path / "unit.xml").write_text(JUNIT.format(bad))
    (tmp_path / "report.json").write_text(json.dumps({"cells": [{"id": "0.18.2", "results": RESULTS}]}))
    return without_passed([what], read_passed([tmp_path / "unit.xml", tmp_path / "report.json"]))


@pytest.mark.parametrize(
    "what",
    [
        control("unit", "unit/kernel/test_a.py::test_one"),
        control("harness", "unit/kernel/test_a.py::TestMachine", "unit/kernel/test_a.py"),
        control("0.18", "compat/test_b.py::test_two"),
        control("upstream", "compat/test_b.py::test_two"),
    ],
)
def test_what_passed_is_not_run_again(tmp_path, what):
    assert left(tmp_path, what) == []


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        (control("unit", "unit/kernel/test_a.py::test_one"), "<failure/>"),
        (control("unit", "unit/kernel/test_a.py"), "<skipped/>"),
        (control("unit", "unit/kernel/test_a.py::test_on"), ""),
        (control("unit", "unit/kernel/test_a.py::test_one", "unit/kernel/test_c.py::test_gone"), ""),
        (control("0.18", "compat/test_b.py::test_two", "compat/test_b.py::test_three"), ""),
        (control("0.17", "compat/test_b.py::test_two"), ""),
        (control("0.18", "compat/test_b.py::test_two", env={"MCORE_COMPAT_BACKPORT": "honest"}), ""),
    ],
)
def test_anything_else_is(tmp_path, what, bad):
    assert left(tmp_path, what, bad=bad) == [what]
