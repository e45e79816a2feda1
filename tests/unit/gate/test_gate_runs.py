"""The gate and a bisection by running, with the cells' runs replaced by what they would report."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_builders import cell

from mcore_compat.bisect import run as bisect_run
from mcore_compat.bisect.search import first_bad
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.files.scrub import Scrubber
from mcore_compat.gate import run as gate_run
from mcore_compat.gate import steps as gate_steps
from mcore_compat.gate.run import GateConfig, run_gate
from mcore_compat.gate.sides import read_sides
from mcore_compat.gate.witness import Outcome
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import Selection
from mcore_compat.pipeline.run_folder import RunFolder, RunPlan
from mcore_compat.pipeline.session import Prepared, RunConfig
from mcore_compat.report import gate_text as render
from mcore_compat.results import CheckResult, Report, SubjectInfo
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig(
    root=ROOT, cells=Path("c"), reports=Path("r"), suite=Path("s"), inventory=Path("i"), selection=Selection(), jobs=1,
    profile="ci",
)  # fmt: skip
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@contextlib.contextmanager
def no_display(_):
    yield SimpleNamespace()


@pytest.fixture
def cells_report(monkeypatch, tmp_path):
    """Give the results of one run after the other; returns the ids of the cells that were run."""
    runs: list[dict[str, object]] = []
    asked: list[tuple[str, ...]] = []

    def prepare(config, host, now):
        plan = RunPlan(run_id=f"run-{len(asked)}", started="x", planned=(), profile="ci", inputs={"suite": "0"})
        matrix = load_matrix(ROOT / "compat_matrix" / "matrix.toml")
        uv = SimpleNamespace(interpreter=Path)
        folder = RunFolder(tmp_path, Scrubber({}))
        return Prepared(config, matrix, None, None, (), None, uv, {}, folder, plan, host)

    def execute(run, display):
        asked.append(tuple(c.id for c in run.cells))
        assert run.plan.planned == asked[-1]
        results = runs.pop(0)
        return Report(
            run_id=run.plan.run_id, started="x", seconds=1, verdict=Verdict.OK, suite_sha256="0", profile="ci",
            subject=SubjectInfo(name="s", version="1", sha256="0"), planned=run.plan.planned,
            cells=tuple(results[c.id] for c in run.cells),
        )  # fmt: skip

    for module in (gate_run, bisect_run):
        monkeypatch.setattr(module, "prepare", prepare)
        monkeypatch.setattr(module, "execute", execute)
    monkeypatch.setattr(gate_run, "_has_gpu", lambda: False)
    outcomes = iter([Outcome("fail"), Outcome("pass")] * 20)
    monkeypatch.setattr(gate_steps, "run_witnesses", lambda lines, *_: [next(outcomes) for _ in lines])
    return runs, asked


def judge(candidate="0.18.0", baseline="0.17.1", *, rerun=True):
    sides = read_sides(ROOT, candidate, baseline, ())
    return run_gate(GateConfig(CONFIG, rerun=rerun), sides, no_display, {}, NOW)


def test_two_green_cells_are_run_once_and_moved_modes_are_drift(cells_report):
    runs, asked = cells_report
    runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0")})
    gate, report = judge()
    assert asked == [("0.17.1", "0.18.0")]
    assert (gate.verdict, gate.run_id) == (Verdict.DRIFT, "run-0")
    assert report is not None
    assert {t.name: t.ran for t in gate.tiers} == {"static": True, "cpu": True, "witness": True, "gpu": False}
    assert {f.witness for f in gate.of("fixed", "drift")} <= {"confirmed", "refuted"}


def test_a_new_failure_is_run_again_and_stays(cells_report):
    runs, asked = cells_report
    broken = {"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0", failures={"a.py::t": "KeyError"})}
    runs += [broken, broken]
    gate, _ = judge()
    assert len(asked) == 2
    assert gate.verdict is Verdict.BREAK
    assert [f.title for f in gate.of("new", "break")] == ["a.py::t"]


def test_a_failure_without_our_code_on_the_stack_is_upstream_s(cells_report, tmp_path):
    runs, _ = cells_report
    failures = {"a.py::t": "TypeError in a constructor", "b.py::t": "wrong numbers"}
    runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0", failures=failures)})
    log = tmp_path / "cells" / "0.18.0" / "reportlog.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{json.dumps(event)}\n" for event in (
        failed("a.py::t[1]", "suite/a.py", "venv/site-packages/megatron/core/x.py"),
        failed("a.py::t[2]", "suite/a.py", "venv/site-packages/megatron/core/y.py"),
        failed("b.py::t", "suite/b.py", "src/mcore_fused/head/fused.py", "venv/site-packages/megatron/core/y.py"),
    )) + "not json\n")  # fmt: skip
    gate, _ = judge(rerun=False)
    assert {f.title: f.upstream for f in gate.of("new", "break")} == {"a.py::t": True, "b.py::t": False}
    assert "1 of 2 failures are broken upstream, not by us" in gate.reason
    assert gate.verdict is Verdict.BREAK
    assert "a.py::t: TypeError in a constructor [broken upstream, not by us]" in render.text(gate)


def failed(node: str, *files: str) -> dict:
    entries = [{"type": "ReprEntry", "data": {"reprfileloc": {"path": path, "lineno": 1}}} for path in files]
    return {
        "nodeid": node,
        "when": "call",
        "outcome": "failed",
        "longrepr": {"reprtraceback": {"reprentries": entries}},
    }


def test_a_failure_that_is_gone_the_second_time_is_flaky_and_not_green(cells_report):
    runs, _ = cells_report
    runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0", failures={"a.py::t": "timeout"})})
    runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0")})
    gate, _ = judge()
    assert gate.verdict is Verdict.UNPROVEN
    assert [f.title for f in gate.of("flaky")] == ["a.py::t"]


def test_a_candidate_that_cannot_be_installed_gets_no_witness(cells_report):
    runs, _ = cells_report
    lost = cell("0.18.0", Verdict.UNRESOLVABLE, reason="torch>=99 conflicts with torch==2.11.0")
    runs.append({"0.17.1": cell("0.17.1"), "0.18.0": lost})
    gate, _ = judge(rerun=False)
    assert (gate.verdict, gate.reason) == (Verdict.UNRESOLVABLE, "torch>=99 conflicts with torch==2.11.0")
    assert {f.witness for f in gate.findings if f.origin == "contract"} <= {"not run", "none"}


def test_failures_that_both_sides_have_are_told_and_not_held_against_it(cells_report):
    runs, asked = cells_report
    both = {"a.py::t": "KeyError"}
    runs.append({"0.18.0": cell("0.18.0", failures=both), "0.18.2": cell("0.18.2", failures=both)})
    gate, _ = judge("0.18.2", "0.18.0")
    assert len(asked) == 1
    assert gate.verdict is Verdict.OK
    assert "1 failure on both sides" in gate.reason


def test_a_bisection_by_running_goes_around_what_cannot_be_judged(cells_report):
    runs, asked = cells_report
    contracts = load_snapshots(ROOT / "compat_matrix" / "contracts")
    line = ["0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0"]

    def result(name):
        if name == "0.17.0":
            return cell(name, Verdict.INFRA)
        outcome = "failed" if name >= "0.17.1" else "passed"
        return cell(name, results=(CheckResult(check="a.py::t", outcome=outcome),))

    runs += [{name: result(name) for name in line}] * 10
    judge_by_running = bisect_run.check_runner(
        CONFIG, "a.py::t", lambda name: (parse_candidate(name), contracts[name]), contracts, SimpleNamespace(), {}
    )
    found = first_bad(line, judge_by_running)
    assert (found.good, found.bad, found.unknown) == ("0.16.1", "0.17.1", ("0.17.0",))
    assert len(asked) == found.asked
