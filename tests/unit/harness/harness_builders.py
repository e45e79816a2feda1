"""Small true values of the harness's types, each a keyword away from a fault."""

import datetime as dt
import json

from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.expectations import Expectation, Expectations
from mcore_compat.matrix.inventory import Inventory
from mcore_compat.records import (
    Environment,
    EnvironmentFacts,
    Files,
    Finished,
    Imported,
    Origins,
    Provisioned,
    SuiteFacts,
    SuiteRun,
)
from mcore_compat.results import CellResult, Evidence, Finding, MegatronCore, Report, SubjectInfo
from mcore_compat.run.report_log import parse
from mcore_compat.verdicts import Verdict, worst

TODAY = dt.date(2026, 11, 30)
CHECKS = ("test_a.py::test_one", "test_a.py::test_two", "test_b.py::test_three")
ORIGIN = "lib/python3.12/site-packages/megatron/core/__init__.py"


def cell(version="0.18.2", **changes):
    fields = {
        "id": version,
        "megatron_core": version,
        "contract_class": "0.18+",
        "expected_mode": "hook",
        "python": "3.12",
        "torch": "2.11.0",
        "lane": "cpu",
        "time_limit_s": 600,
        "constraints": [{"spec": "numpy<2.5", "reason": "Triton's interpreter"}],
    }
    return Cell.model_validate(fields | changes)


def files(**changes):
    return Files(**({"count": 480, "sha256": "ab" * 32} | changes))


def imported(version="0.18.2", **changes):
    fields = {
        "modules": 193,
        "foreign": {},
        "attribute": version,
        "origin": ORIGIN,
        "versions": {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.4.6"},
        "seconds": 8.0,
    }
    return Imported(**(fields | changes))


def facts(version="0.18.2", distributions=None, **changes):
    installed = {
        "megatron-core": (version,),
        "mcore-compat": ("0.1.0",),
        "torch": ("2.11.0",),
        "triton": ("3.6.0",),
        "numpy": ("2.4.6",),
    }
    fields = {
        "python": "3.12.1",
        "user_site": False,
        "distributions": installed | (distributions or {}),
        "megatron_roots": ("lib/python3.12/site-packages/megatron",),
        "megatron_files": files(),
        "subject_files": files(),
        "imported": imported(version),
        "files": dict.fromkeys(installed, "ab" * 32),
        "startup": {"distutils-precedence.pth": "setuptools"},
        "tops": {"megatron": ()},
        "plugins": {"pytest-timeout": ("timeout = pytest_timeout",)},
        "settings": "cd" * 32,
        "path": ("/usr/lib/python3.12", "lib/python3.12/site-packages"),
    }
    return EnvironmentFacts(**(fields | changes))


LOCKED = {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.4.6", "megatron-core": "0.18.2"}


def provisioned(folder="cells/0.18.2", version="0.18.2", **changes):
    return Provisioned(1.5, Environment(folder, facts(version, **changes), "lock", reused=True))


def entry(check, outcome="passed", when="call", message="", parameter=""):
    report = {
        "$report_type": "TestReport",
        "nodeid": check + parameter,
        "when": when,
        "outcome": outcome,
        "duration": 0.25,
    }
    if message:
        report["longrepr"] = {"reprtraceback": {"reprentries": [{"data": {"lines": [f"E       {message}"]}}]}}
    return json.dumps(report)


def log_lines(checks=CHECKS, outcomes=None, messages=None, exit_status=None):
    """The lines of a whole report log."""
    outcomes, messages = outcomes or {}, messages or {}
    lines = [json.dumps({"$report_type": "SessionStart", "pytest_version": "9.2.0"})]
    for check in checks:
        lines.append(entry(check, when="setup"))
        outcome = outcomes.get(check, "passed")
        usual = "assert 1 == 2" if outcome == "failed" else ""
        lines.append(entry(check, outcome, message=messages.get(check, usual)))
        lines.append(entry(check, when="teardown"))
    if exit_status is None:
        exit_status = 1 if "failed" in outcomes.values() else 0
    return [*lines, json.dumps({"$report_type": "SessionFinish", "exitstatus": exit_status})]


def suite_facts(version="0.18.2", checks=CHECKS, **changes):
    fields = {
        "megatron_core": {"distribution": version, "attribute": version, "origin": ORIGIN},
        "python": "3.12.1",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "numpy": "2.4.6",
        "device": "cpu",
        "mode": "hook",
        "evidence": Evidence(hook_calls=3, deferred_head_calls=2, kernel_launches=9),
        "collected": tuple(checks),
        "seconds": {"imports": 8.1, "suite": 20.0},
        "complete": True,
    }
    return SuiteFacts.model_validate(fields | changes)


def origins(**changes):
    fields = {
        "modules": {"megatron": 190, "mcore_fused": 20, "torch": 900},
        "foreign": {},
        "versions": {"megatron-core": "0.18.2"},
    }
    return Origins(**(fields | changes))


def finished(returncode=0, **changes):
    fields = {"timed_out": False, "cancelled": False, "seconds": 30.0, "output": "3 passed"}
    return Finished(returncode=returncode, **(fields | changes))


def suite_run(lines=None, **changes):
    log = parse(log_lines() if lines is None else lines)
    fields = {
        "finished": finished(log.exit_status or 0),
        "log": log,
        "facts": suite_facts(),
        "facts_problem": "",
        "origins": (origins(),),
    }
    return SuiteRun(**(fields | changes))


def inventory(checks=CHECKS, **evidence):
    rules = {"cpu": ["kernel_launches"]} | evidence
    return Inventory.model_validate(
        {"schema_version": 1, "evidence": rules, "check": [{"id": check} for check in checks]}
    )


def expectations(*entries):
    return Expectations(schema_version=1, expectation=tuple(entries))


def expectation(**changes):
    fields = {
        "cell": "0.18.*",
        "check": CHECKS[0],
        "kind": "fail",
        "reason": "upstream scales twice",
        "failure": None if changes.get("kind") == "skip" else r"assert \d == \d",
        "link": "https://example.org/1",
        "expires": TODAY + dt.timedelta(days=30),
    }
    return Expectation.model_validate(fields | changes)


def result(version="0.18.2", verdict=Verdict.OK, findings=(), **changes):
    fields = {
        "id": version,
        "megatron_core": MegatronCore(requested=version, distribution=version),
        "contract_class": "x",
        "lane": "cpu",
        "expected_mode": "hook",
        "verdict": verdict,
        "findings": tuple(findings),
    }
    return CellResult(**(fields | changes))


def finding(message="assert 1 == 2", check=CHECKS[0], kind="failed-check", verdict=Verdict.BREAK):
    return Finding(kind=kind, message=message, check=check, next_step="look", verdict=verdict)


def report(*cells, findings=()):
    return Report(
        run_id="20261130T100000Z-abcd",
        started="2026-11-30T10:00:00+00:00",
        seconds=61.2,
        verdict=worst(cell.verdict for cell in cells),
        subject=SubjectInfo(name="mcore-compat", version="0.1.0", sha256="ab" * 32),
        suite_sha256="cd" * 32,
        profile="ci",
        planned=tuple(cell.id for cell in cells),
        cells=cells,
        findings=tuple(findings),
    )


def write_facts(path, **changes):
    """A suite's file of facts; values as they are, whether valid or not."""
    path.write_text(json.dumps(suite_facts().model_dump(mode="json") | changes), encoding="utf-8")
