"""Whatever a cell writes, or however it ends, is the result of that cell: bounded, printable, never an exception."""

import json
import os
import signal
import xml.etree.ElementTree as ET

import harness_builders as build
import pytest
from harness_project import passing_suite, run
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.files.atomic import write_atomically
from mcore_compat.files.scrub import Scrubber
from mcore_compat.files.untrusted import UnusableFileError, printable, read_bounded
from mcore_compat.judge import cell as judge
from mcore_compat.judge.cell import judge_cell
from mcore_compat.run.report_log import parse
from mcore_compat.run.suite_facts import read_facts, read_origins
from mcore_compat.verdicts import Verdict

CALL = {"$report_type": "TestReport", "nodeid": "a.py::b", "when": "call", "outcome": "passed", "duration": 0.1}
ODD_LINES = {
    "nested deeply": "[" * 200_000 + "]" * 200_000,
    "nested too deeply for a report": "[" * 100 + "]" * 100,
    "an end without a status": '{"$report_type": "SessionFinish"}',
    "an end whose status is a text": '{"$report_type": "SessionFinish", "exitstatus": "0"}',
    "an end whose status is a truth value": '{"$report_type": "SessionFinish", "exitstatus": false}',
    "a text as duration": json.dumps(CALL | {"duration": "0.1"}),
    "an endless duration": json.dumps(CALL | {"duration": float("inf")}),
    "a duration beyond all numbers": json.dumps(CALL).replace("0.1", "1e999"),
    "a negative duration": json.dumps(CALL | {"duration": -1}),
    "no outcome": json.dumps({name: value for name, value in CALL.items() if name != "outcome"}),
    "an outcome of another plugin": json.dumps(CALL | {"outcome": "rerun"}),
    "a number as node": json.dumps(CALL | {"nodeid": 7}),
    "a list as traceback": json.dumps(CALL | {"outcome": "failed", "longrepr": {"reprtraceback": [1, 2]}}),
    "texts as entries": json.dumps(CALL | {"outcome": "failed", "longrepr": {"reprtraceback": {"reprentries": ["x"]}}}),
    "a reason that is no text": json.dumps(CALL | {"outcome": "skipped", "wasxfail": ["x"]}),
    "a line without an end": '"' + "x" * (9 << 20) + '"',
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_a_line_of_another_shape_makes_the_log_incomplete(line):
    log = parse([*build.log_lines(), line])
    assert (log.broken_line, log.complete) == (len(build.log_lines()) + 1, False)
    assert len(log.checks) >= len(build.CHECKS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries(dict.fromkeys(CALL, JSON), optional={"longrepr": JSON, "wasxfail": JSON}))
def test_no_shape_raises(entry):
    parse([json.dumps(entry)])
    parse([json.dumps(CALL | {"outcome": "failed", "longrepr": entry})])


HOSTILE = "\x1b[2J\x1b]0;owned\x07red\x00a\x0bb\x9b31m caf\udce9 \u202erev\u2028 \uffff end"


def test_control_characters_are_removed_or_written_out():
    assert printable(HOSTILE) == "red\\x00a\\x0bb caf\\udce9 \\u202erev\\u2028 \\uffff end"
    assert printable("kept: é ≤ 漢字 🙂\ttab\nline") == "kept: é ≤ 漢字 🙂\ttab\nline"
    assert printable("x" * 50, 10) == "x" * 10 + "… 40 more characters"


@given(st.text(alphabet=st.characters()))
def test_a_printable_text_can_be_written_in_every_format(text):
    clean = printable(text)
    assert printable(clean) == clean
    element = ET.Element("x", a=clean)
    element.text = clean
    assert ET.fromstring(ET.tostring(element, encoding="utf-8")).text in {clean, None if clean == "" else clean}
    assert not any(ord(character) < 32 and character not in "\t\n" for character in clean)


def test_messages_and_names_of_a_log_are_printable():
    lines = [
        json.dumps(CALL | {"nodeid": f"a.py::b[{HOSTILE}]", "outcome": "failed", "longrepr": f"E   {HOSTILE}"}),
        json.dumps({"$report_type": "CollectReport", "nodeid": HOSTILE, "outcome": "failed", "longrepr": HOSTILE}),
    ]
    log = parse(lines)
    for text in (*log.checks, log.checks["a.py::b"].message, *log.collection_errors, *log.collection_errors.values()):
        assert text
        assert printable(text) == text


def test_facts_and_origins_are_printable_and_bounded(tmp_path):
    build.write_facts(tmp_path / "facts.json", device=HOSTILE.replace("\udce9", "é"))
    facts, _ = read_facts(tmp_path)
    assert "\x1b" not in facts.device
    assert "red" in facts.device
    for name, value in (("evidence", {"hook_calls": -1}), ("seconds", {"suite": float("nan")})):
        build.write_facts(tmp_path / "facts.json", **{name: value})
        assert read_facts(tmp_path)[0] is None
    (tmp_path / "facts.json").write_text("[" * 100_000, encoding="utf-8")
    assert read_facts(tmp_path)[0] is None
    (tmp_path / "origins-1.json").symlink_to("/etc/hostname")
    assert read_origins(tmp_path.glob("origins-*.json"), "") == ()


def test_a_pipe_among_the_facts_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "facts.gw0.json")
    facts, problem = read_facts(tmp_path)
    assert facts is None
    assert "facts.gw0.json" in problem


def test_only_regular_files_of_a_known_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"caf\xe9")
    assert read_bounded(tmp_path / "file", 4) == "caf�"
    with pytest.raises(UnusableFileError, match="larger"):
        read_bounded(tmp_path / "file", 3)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UnusableFileError, match="link"):
        read_bounded(tmp_path / "link", 100)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_regular_file_is_not_copied_into_a_report(kind, tmp_path):
    path, secret = tmp_path / "output.log", tmp_path / "secret"
    secret.write_text("token", encoding="utf-8")
    {"link": lambda: path.symlink_to(secret), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    Scrubber({}).file(path)
    assert path.read_text(encoding="utf-8").startswith("removed: output.log is")
    assert secret.read_text(encoding="utf-8") == "token"


def test_a_log_above_the_limit_is_cut_with_a_count(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_compat.files.scrub.FILE_LIMIT", 100)
    (tmp_path / "output.log").write_text("0123456789\n" * 50 + "\x1b[31mred", encoding="utf-8")
    Scrubber({}).file(tmp_path / "output.log")
    lines = (tmp_path / "output.log").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "… 448 more characters"
    assert len(lines) == 12


@pytest.mark.parametrize("number", [int(signal.SIGKILL), 32, 40, 64])
def test_a_suite_may_die_of_any_signal(number):
    run = build.suite_run(build.log_lines()[:3], finished=build.finished(-number))
    result = judge_cell(build.cell(), build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY)
    assert result.verdict is Verdict.UNPROVEN
    assert "died of" in result.findings[0].message


def test_processes_left_behind_are_told_and_not_counted():
    run = build.suite_run(finished=build.finished(left_behind=("sleep 300",)))
    result = judge_cell(build.cell(), build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY)
    assert result.verdict is Verdict.OK
    assert [(finding.kind, finding.verdict) for finding in result.findings] == [("left-behind", None)]
    assert "sleep 300" in result.findings[0].message


def test_a_suite_with_too_many_processes_is_unproven():
    run = build.suite_run(finished=build.finished(-9, excess="it had 2000 processes, the limit is 1024"))
    result = judge_cell(build.cell(), build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY)
    assert result.verdict is Verdict.UNPROVEN
    assert "process-limit" in {finding.kind for finding in result.findings}


def test_an_error_of_the_judge_is_the_result_of_the_cell(monkeypatch):
    def fails(*_arguments):
        raise KeyError("caf\udce9\x1b[31m")

    monkeypatch.setattr(judge.complaints, "of_checks", fails)
    result = judge_cell(
        build.cell(), build.provisioned(), build.suite_run(), build.inventory(), build.expectations(), build.TODAY
    )
    assert (result.verdict, [finding.kind for finding in result.findings]) == (Verdict.UNPROVEN, ["judge-error"])
    assert "KeyError" in result.reason


def test_one_odd_message_costs_one_cell(project):
    def suite(cell, environment, options, out, *rest):
        if cell.id != "0.18.0":
            return passing_suite(cell, environment, options, out, *rest)
        out.mkdir(parents=True, exist_ok=True)
        lines = build.log_lines(outcomes={build.CHECKS[0]: "failed"}, messages={build.CHECKS[0]: HOSTILE})
        return build.suite_run(lines, facts=build.suite_facts(cell.megatron_core, mode=cell.expected_mode))

    report, _ = run(project, suite=suite)
    assert [cell.verdict for cell in report.cells] == [Verdict.BREAK, Verdict.OK, Verdict.OK]
    assert report.model_dump_json().encode("utf-8")


def test_a_lone_surrogate_can_be_written(tmp_path):
    write_atomically(tmp_path / "x.md", "caf\udce9")
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == "caf\\udce9"
