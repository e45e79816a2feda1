"""The suite's own process, as the harness starts it: one folder for each attempt, and nothing else that counts."""

import marshal
import os
import sys
import threading

import harness_builders as build
import pytest

from mcore_compat.judge.cell import judge_cell
from mcore_compat.run.suite import SuiteOptions, run_suite
from mcore_compat.verdicts import Verdict


@pytest.fixture
def started(tmp_path):
    """Runs a suite with this interpreter in the place of a cell's."""
    binaries = tmp_path / "cell" / "venv" / "bin"
    binaries.mkdir(parents=True)
    (tmp_path / "cell" / "home").mkdir()
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    (binaries / "python").chmod(0o755)
    suite = tmp_path / "suite"
    suite.mkdir()
    environment = build.provisioned(folder=tmp_path / "cell").environment

    def start(text, cell=None, **options):
        (suite / "test_a.py").write_text(text, encoding="utf-8")
        chosen = SuiteOptions(suite, "ci", **options)
        return run_suite(cell or build.cell(), environment, chosen, tmp_path / "out", os.environ, threading.Event())

    return start


def test_what_a_suite_leaves_is_read_from_the_folder_of_its_attempt(started, tmp_path):
    run = started("def test_one():\n    assert 1 + 1 == 2\n")
    assert (run.finished.returncode, run.log.complete) == (0, True)
    assert list(run.log.checks) == ["test_a.py::test_one"]
    assert len(run.origins) == 1
    assert {path.name.split("-")[0] for path in (tmp_path / "out").iterdir()} == {
        "output.log", "reportlog.jsonl", "origins",
    }  # fmt: skip


def test_what_lies_there_from_another_attempt_does_not_count(started, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    build.write_facts(out / "facts.json")
    (out / "origins-1.json").write_text(build.origins().model_dump_json(), encoding="utf-8")
    forger = (
        "import os, pathlib\ndef test_one():\n"
        f"    for name in os.listdir({str(out)!r}):\n"
        "        assert name.startswith('attempt-'), name\n"
        f"    pathlib.Path({str(out)!r}, 'facts.json').write_text('forged')\n"
        f"    pathlib.Path(os.environ['MCORE_COMPAT_CELL_OUT'], 'large.bin').write_text('x')\n"
        f"    pathlib.Path(os.environ['MCORE_COMPAT_CELL_OUT'], 'origins-1.json').write_text('{{}}')\n"
    )
    run = started(forger)
    assert run.finished.returncode == 0
    assert (run.facts, run.facts_problem) == (None, "the suite wrote no facts.json")
    assert len(run.origins) == 1
    assert not list(out.rglob("large.bin"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out-")]


def test_a_log_that_is_no_file_is_an_incomplete_log(started):
    run = started(
        "import os, pathlib\ndef test_one():\n"
        "    log = pathlib.Path(os.environ['MCORE_COMPAT_CELL_OUT'], 'reportlog.jsonl')\n"
        "    log.unlink()\n    log.symlink_to('/etc/hostname')\n"
    )
    assert not run.log.complete
    assert run.log.problem == "reportlog.jsonl is a link"


def test_a_check_that_hangs_costs_its_cell_its_time_limit_and_no_more(started):
    """It ignores the polite signal, has its output end in the middle of a line, and holds a process of its own."""
    cell = build.cell(time_limit_s=10)
    run = started(
        "import os, signal, subprocess, time\n"
        "def test_one():\n    pass\n"
        "def test_two():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    subprocess.Popen(['sleep', '60'])\n    os.write(1, b'half a line')\n"
        "    while True:\n        time.sleep(1)\n",
        cell,
    )
    assert (run.finished.timed_out, run.finished.cancelled) == (True, False)
    assert run.finished.seconds < 30
    result = judge_cell(cell, build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY)
    assert result.verdict is Verdict.UNPROVEN
    assert "time-limit" in {finding.kind for finding in result.findings}


def test_plugins_are_loaded_by_name_only(started, tmp_path):
    """A plugin that a package of the environment offers to pytest is not loaded."""
    run = started(
        "def test_one(pytestconfig):\n"
        "    names = {name for name, _ in pytestconfig.pluginmanager.list_name_plugin()}\n"
        "    assert {'pytest_timeout', 'pytest_reportlog.plugin', '_hypothesis_pytestplugin'} <= names\n"
        "    assert not pytestconfig.pluginmanager.list_plugin_distinfo()\n"
    )
    assert run.finished.returncode == 0, run.finished.output


def test_bytecode_that_was_changed_between_runs_is_not_used(started, tmp_path):
    (tmp_path / "suite" / "helper.py").write_text("VALUE = 1\n", encoding="utf-8")
    check = "import helper\ndef test_one():\n    assert helper.VALUE == 1\n"
    assert started(check).finished.returncode == 0
    (compiled,) = (tmp_path / "cell" / "home" / "bytecode").rglob("helper.*.pyc")
    kept = compiled.stat().st_mtime_ns
    assert started(check).finished.returncode == 0
    assert compiled.stat().st_mtime_ns == kept
    softened = compile("VALUE = 2\n", "helper.py", "exec")
    compiled.write_bytes(compiled.read_bytes()[:16] + marshal.dumps(softened))
    changed = compiled.stat().st_mtime_ns
    assert started(check).finished.returncode == 0
    assert compiled.stat().st_mtime_ns != changed
    assert not list((tmp_path / "suite").rglob("__pycache__"))
