"""The command line: exit codes, one clear message, and what is committed is current."""

import json
import subprocess
import sys
from pathlib import Path

import harness_builders as build
import pytest
from typer.testing import CliRunner

from mcore_compat.cli import main as cli
from mcore_compat.cli import run as run_cli
from mcore_compat.errors import InfrastructureError, McoreCompatError

ROOT = Path(__file__).parents[3]


def call(*arguments, monkeypatch, capsys):
    """Exit code, output and errors of the entry point."""
    monkeypatch.setattr(sys, "argv", ["mcore-compat", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_an_unknown_version_is_a_usage_error(monkeypatch, capsys):
    code, _, err = call("run", "--select", "0.18.1", "--root", str(ROOT), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "No cell of the matrix matches `0.18.1`" in err
    assert "next:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [RuntimeError("odd"), RecursionError(), KeyError("x"), OSError(28, "full")])
def test_what_the_command_line_does_not_know_is_no_verdict(error, monkeypatch, capsys):
    """Python's own exit status for a traceback is 1, which reads as "this megatron-core breaks"."""

    def broken(*_, **__):
        raise error

    monkeypatch.setattr(cli, "app", broken)
    code, _, err = call("plan", "--root", str(ROOT), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 3
    assert "The harness itself failed." in err
    assert "next:" in err


def test_a_call_outside_of_a_checkout(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("plan", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "matrix.toml was found" in err) == (2, True)


def test_a_host_that_cannot_judge_ends_with_three(monkeypatch, capsys):
    def prepare(*_):
        raise InfrastructureError("no network.", "connect it.")

    monkeypatch.setattr(run_cli.IndexLane, "open", prepare)
    code, _, err = call("run", "--root", str(ROOT), monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err) == (3, "error: no network.\nnext:  connect it.\n")


def test_a_fault_of_the_harness_is_not_a_verdict(monkeypatch, capsys):
    def broken(*_):
        raise RecursionError

    monkeypatch.setattr(run_cli, "matrix_of", broken)
    code, _, err = call("plan", "--root", str(ROOT), monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "RecursionError" in err, "next:" in err) == (3, True, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--resume", "--select", "0.18.2"), "do not apply"),
        (("run", "--profile", "nightlyy"), "There is no profile `nightlyy`"),
        (("gate", "megatron-core==0.18.2", "--latest"), "name a candidate"),
        (("gate",), "There is no candidate"),
    ],
)
def test_options_that_would_be_dropped_are_refused(arguments, words, monkeypatch, capsys):
    code, _, err = call(*arguments, "--root", str(ROOT), monkeypatch=monkeypatch, capsys=capsys)
    assert (code, words in err) == (2, True), err


def test_an_inventory_of_a_run_without_checks_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "report.json").write_text(build.report(build.result(results=[])).model_dump_json(), encoding="utf-8")
    arguments = ("inventory", "--from", str(tmp_path), "--root", str(ROOT))
    code, _, err = call(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "has run a check" in err) == (2, True)


def test_the_plan_for_github_is_json():
    found = []
    for shard in ([], ["--shard", "1/2"], ["--shard", "2/2"]):
        result = CliRunner().invoke(cli.app, ["plan", "--github", "--classes", *shard, "--root", str(ROOT)])
        assert result.exit_code == 0
        found.append([job["cell"] for job in json.loads(result.output)["include"]])
    assert found[0] == [
        "0.12.3", "0.13.1", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2",
        "0.17.1-backport-honest", "0.17.1-backport-dishonest",
    ]  # fmt: skip
    assert sorted(found[1] + found[2]) == sorted(found[0])
    assert abs(len(found[1]) - len(found[2])) <= 1


def test_the_committed_schemas_are_current():
    result = CliRunner().invoke(cli.app, ["schema", "--check", "--root", str(ROOT)])
    assert result.exit_code == 0, result.exception


def test_an_inventory_is_derived_from_a_report(tmp_path):
    ran = [{"check": check, "outcome": "passed"} for check in build.CHECKS]
    report = build.report(build.result(results=ran))
    (tmp_path / "report.json").write_text(report.model_dump_json(), encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["inventory", "--from", str(tmp_path), "--root", str(ROOT)])
    assert result.exit_code == 0
    assert all(f'id = "{check}"' in result.output for check in build.CHECKS)


def test_every_error_says_what_next():
    for kind in McoreCompatError.__subclasses__():
        error = kind("It broke.", "Mend it.")
        assert str(error) == "It broke. Next step: Mend it."
        assert error.exit_code in {2, 3}


JUNIT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


FAULTS = {"planted": 5, "caught": 5, "left_out": 0, "failing_controls": [], "kinds": {}}
PASSED, FAILED, EXPECTED = [("passed", True)], [("failed", False)], [("failed", True)]
ALL_PASSED = JUNIT.format(10, 0, 0, 0)
NO_WITNESS = '{"confirmed": 0, "others": []}'


@pytest.mark.parametrize(
    ("unit", "outcomes", "verdict", "faults", "line", "code"),
    [
        (JUNIT.format(10, 0, 0, 1), PASSED, "ok", FAULTS, "15 passed, 0 failed", 0),
        (JUNIT.format(10, 1, 1, 0), PASSED, "ok", FAULTS, "14 passed, 2 failed", 1),
        (ALL_PASSED, FAILED, "break", FAULTS, "15 passed, 1 failed", 1),
        (ALL_PASSED, EXPECTED, "ok", FAULTS, "15 passed, 0 failed", 0),
        (ALL_PASSED, PASSED, "unproven", FAULTS, "16 passed, 1 failed", 1),
        (None, PASSED, "ok", FAULTS, "6 passed, 1 failed", 1),
        (ALL_PASSED, None, "ok", FAULTS, "15 passed, 1 failed", 1),
        (ALL_PASSED, PASSED, "ok", FAULTS | {"caught": 3}, "14 passed, 2 failed", 1),
        (ALL_PASSED, PASSED, "ok", FAULTS | {"failing_controls": ["unit: test_a"]}, "16 passed, 1 failed", 1),
        (ALL_PASSED, PASSED, "ok", None, "11 passed, 1 failed", 1),
    ],
)
def test_the_closing_line_counts_all_and_never_hides_a_red_cell(unit, outcomes, verdict, faults, line, code, tmp_path):
    if unit is not None:
        (tmp_path / "unit.xml").write_text(unit, encoding="utf-8")
    if outcomes is not None:
        results = [{"outcome": outcome, "expected": expected} for outcome, expected in outcomes]
        passed = sum(outcome == "passed" for outcome, _ in outcomes)
        cell = {"verdict": verdict, "checks": {"passed": passed}, "results": results}
        (tmp_path / "report.json").write_text(json.dumps({"cells": [cell]}), encoding="utf-8")
    if faults is not None:
        (tmp_path / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
    (tmp_path / "witnesses.json").write_text(NO_WITNESS, encoding="utf-8")
    files = [tmp_path / name for name in ("unit.xml", "report.json", "witnesses.json", "faults.json")]
    assert tally(*files)[1:] == (line, code)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ('{"confirmed": 48, "others": []}', "witnesses: 48 passed, 0 failed"),
        ('{"confirmed": 46, "others": ["hook-absent", "import-new"]}', "witnesses: 46 passed, 2 failed"),
        (None, "witnesses: 0 passed, 1 failed"),
    ],
)
def test_witnesses_that_are_not_confirmed_are_failures(found, told, tmp_path):
    if found is not None:
        (tmp_path / "witnesses.json").write_text(found, encoding="utf-8")
    lines, _, code = tally("absent", "absent", tmp_path / "witnesses.json", "absent")
    assert told in lines
    assert code == 1


def tally(*files):
    """Every line, the last one, and the exit code of what CI closes with."""
    command = [sys.executable, ROOT / ".ci" / "tally.py", *files]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return lines, lines[-1], done.returncode


def test_faults_that_were_left_out_are_said_by_kind(tmp_path):
    left = FAULTS | {"left_out": 8, "kinds": {"runs": {"left_out": 8}, "kernel": {"left_out": 0}}}
    (tmp_path / "faults.json").write_text(json.dumps(left), encoding="utf-8")
    assert "faults left out: 8 runs" in tally("absent", "absent", "absent", tmp_path / "faults.json")[0]
