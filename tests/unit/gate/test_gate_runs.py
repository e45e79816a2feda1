"""The gate and a bisection by running, with the cells' runs replaced by what they would report."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_builders import FakeLane, cell

from mcore_compat.bisect.run import check_runner
from mcore_compat.bisect.search import first_bad
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.gate import run as gate_run
from mcore_compat.gate.run import run_gate
from mcore_compat.gate.sides import read_sides
from mcore_compat.gate.steps import index_steps
from mcore_compat.gate.witness import Outcome
from mcore_compat.pipeline.session import RunOptions
from mcore_compat.project import Project
from mcore_compat.report import gate_text as render
from mcore_compat.results import CheckResult, Report, SubjectInfo
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]
PROJECT = Project.at(ROOT)


@contextlib.contextmanager
def no_display(_):
    yield SimpleNamespace(phase=lambda *_: None)


class Cells:
    """Gives the results of one run after the other; remembers the cells that were run."""

    def __init__(self, folder):
        self.project = replace(PROJECT, reports=folder / "reports")
        self.lane = FakeLane(folder / "cells")
        self.runs: list[dict[str, object]] = []
        self.asked: list[tuple[str, ...]] = []
        self.folders: list[Path] = []
        self.log = ""

    def __call__(self, session, display):
        self.asked.append(tuple(c.id for c in session.cells))
        self.folders.append(session.folder.path)
        assert session.plan.planned == self.asked[-1]
        assert session.plan.kind in {"gate", "bisect"}
        results = self.runs.pop(0)
        if self.log:
            target = session.folder.cell(session.cells[-1].id)
            target.mkdir(parents=True)
            (target / "reportlog.jsonl").write_text(self.log)
        return Report(
            run_id=session.plan.run_id, started="x", seconds=1, verdict=Verdict.OK, suite_sha256="0", profile="ci",
            subject=SubjectInfo(name="s", version="1", sha256="0"), planned=session.plan.planned,
            cells=tuple(results[c.id] for c in session.cells),
        )  # fmt: skip


@pytest.fixture
def cells(tmp_path, monkeypatch):
    outcomes = iter([Outcome("fail"), Outcome("pass")] * 200)
    monkeypatch.setattr(gate_run, "run_witnesses", lambda lines, *_: [next(outcomes) for _ in lines])
    return Cells(tmp_path)


def judge(cells, candidate="0.18.0", baseline="0.17.1", *, rerun=True):
    sides = read_sides(PROJECT, candidate, baseline, ())
    cpu, gpu = index_steps(cells.project, sides, RunOptions(), {}, has_gpu=False)
    steps = (replace(cpu, open_lane=lambda: cells.lane), gpu)
    return run_gate(sides, steps, no_display, {}, rerun=rerun, run_session=cells)


def test_two_green_cells_are_run_once_and_moved_modes_are_drift(cells):
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0")})
    judged = judge(cells)
    gate, report = judged.gate, judged.run.report
    assert cells.asked == [("0.17.1", "0.18.0")]
    assert (gate.verdict, gate.run_id) == (Verdict.DRIFT, cells.folders[0].name)
    assert (cells.folders[0] / "report.json").is_file(), "a gate's run is finished: nothing resumes it"
    assert report is not None
    assert {t.name: t.ran for t in gate.tiers} == {"static": True, "cpu": True, "witness": True, "gpu": False}
    assert {f.witness for f in gate.of("fixed", "drift")} <= {"confirmed", "refuted"}


def test_a_change_in_the_source_is_shown_as_a_diff(cells):
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0")})
    gate = judge(cells).gate
    changes = {f.title: f.change for f in gate.findings if f.origin == "contract"}
    assert all(line[:1] in "+- …" for lines in changes.values() for line in lines)
    (hook,) = (f for f in gate.findings if f.title == "hook-absent" and f.item == "gpt.hook")
    assert any(line.startswith("+") and "called" in line for line in hook.change)
    assert all(not f.change for f in gate.of("same"))


def test_a_build_of_the_baseline_has_its_declared_failures(cells):
    """The candidate's cell is no cell of the matrix, so no exception speaks of it: it is judged by the baseline's."""
    known = CheckResult(check="a.py::t", outcome="failed", message="TypeError: upstream's own")
    old = cell("0.17.1", results=(known,))
    cells.runs.append({"0.17.1": old, "0.18.0": cell("0.18.0", failures={"a.py::t": known.message})})
    gate = judge(cells).gate
    assert gate.candidate.cell.verdict is Verdict.OK
    assert gate.verdict.green
    assert [f.state for f in gate.findings if f.title == "a.py::t"] == ["same"]
    other = cell("0.18.0", failures={"a.py::t": "log_probs differs by 2.35"})
    cells.runs += [{"0.17.1": old, "0.18.0": other}] * 2
    gate = judge(cells).gate
    assert (gate.verdict, gate.candidate.cell.verdict) == (Verdict.BREAK, Verdict.BREAK)


def test_a_new_failure_is_run_again_and_stays(cells):
    broken = {"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0", failures={"a.py::t": "KeyError"})}
    cells.runs += [broken, broken]
    gate = judge(cells).gate
    assert len(cells.asked) == 2
    assert gate.verdict is Verdict.BREAK
    assert [f.title for f in gate.of("new", "break")] == ["a.py::t"]


def test_a_failure_without_our_code_on_the_stack_is_upstream_s(cells):
    failures = {"a.py::t": "TypeError in a constructor", "b.py::t": "wrong numbers"}
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0", failures=failures)})
    cells.log = "".join(f"{json.dumps(event)}\n" for event in (
        failed("a.py::t[1]", "suite/a.py", "venv/site-packages/megatron/core/x.py"),
        failed("a.py::t[2]", "suite/a.py", "venv/site-packages/megatron/core/y.py"),
        failed("b.py::t", "suite/b.py", "src/mcore_fused/head/fused.py", "venv/site-packages/megatron/core/y.py"),
    )) + "not json\n"  # fmt: skip
    gate = judge(cells, rerun=False).gate
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


def test_a_failure_that_is_gone_the_second_time_is_flaky_and_not_green(cells):
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0", failures={"a.py::t": "timeout"})})
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0")})
    gate = judge(cells).gate
    assert gate.verdict is Verdict.UNPROVEN
    assert [f.title for f in gate.of("flaky")] == ["a.py::t"]


def test_a_candidate_that_cannot_be_installed_gets_no_witness(cells):
    lost = cell("0.18.0", Verdict.UNRESOLVABLE, reason="torch>=99 conflicts with torch==2.11.0")
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": lost})
    gate = judge(cells, rerun=False).gate
    assert (gate.verdict, gate.reason) == (Verdict.UNRESOLVABLE, "torch>=99 conflicts with torch==2.11.0")
    assert {f.witness for f in gate.findings if f.origin == "contract"} <= {"not run", "none"}


def test_failures_that_both_sides_have_are_told_and_not_held_against_it(cells):
    both = {"a.py::t": "KeyError"}
    cells.runs.append({"0.18.0": cell("0.18.0", failures=both), "0.18.2": cell("0.18.2", failures=both)})
    gate = judge(cells, "0.18.2", "0.18.0").gate
    assert len(cells.asked) == 1
    assert gate.verdict is Verdict.OK
    assert "1 failure on both sides" in gate.reason


def test_a_bisection_by_running_goes_around_what_cannot_be_judged(cells):
    contracts = load_snapshots(ROOT / "compat_matrix" / "contracts")
    line = ["0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0"]

    def result(name):
        if name == "0.17.0":
            return cell(name, Verdict.INFRA)
        outcome = "failed" if name >= "0.17.1" else "passed"
        return cell(name, results=(CheckResult(check="a.py::t", outcome=outcome),))

    cells.runs += [{name: result(name) for name in line}] * 10
    judge_by_running = check_runner(
        cells.project, "a.py::t", lambda name: (parse_candidate(name), contracts[name]), contracts, cells.lane,
        SimpleNamespace(), {}, cells,
    )  # fmt: skip
    found = first_bad(line, judge_by_running)
    assert (found.good, found.bad, found.unknown) == ("0.16.1", "0.17.1", ("0.17.0",))
    assert len(cells.asked) == found.asked
