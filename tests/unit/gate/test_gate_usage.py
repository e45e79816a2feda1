"""The gate reads the project's own source first: states, levels, expectations, witnesses, and every format."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from gate_builders import RAN, cell, side
from test_gate_runs import PROJECT, Cells, no_display

from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.files.scrub import Scrubber
from mcore_compat.gate import run as gate_run
from mcore_compat.gate.decide import decide
from mcore_compat.gate.run import run_gate
from mcore_compat.gate.sides import read_sides
from mcore_compat.gate.steps import index_steps
from mcore_compat.gate.witness import Outcome, judge_usage_witness, run_witnesses
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.pipeline.session import RunOptions
from mcore_compat.project import Project
from mcore_compat.report.annotations import render_annotations
from mcore_compat.report.gate_text import markdown, text
from mcore_compat.report.sarif import render_sarif
from mcore_compat.report.write import write_gate
from mcore_compat.usage.gate_findings import check_source
from mcore_compat.usage.upstream import SummaryCache
from mcore_compat.verdicts import Verdict

TODAY = dt.date(2029, 1, 1)
OLD = {
    "core/__init__.py": "",
    "core/m.py": (
        "def f(a, k=1): return a\ndef gone(): ...\nclass C:\n    def go(self, x): ...\n    def old(self): ...\n"
    ),
}
NEW = OLD | {"core/m.py": "def f(a): return a\nclass C:\n    def go(self, x, y): ...\n"}
SOURCE = """
from megatron.core.m import C, f
from megatron.core import m
def run(c: C):
    m.gone()
    f(1, k=2)
    C.go(c, 1)
class Mine(C):
    def old(self): ...
"""
RULES = {
    ("missing-attribute", "acme/train.py:5"): "break",
    ("call-does-not-fit", "acme/train.py:6"): "break",
    ("call-does-not-fit", "acme/train.py:7"): "break",
    ("dead-override", "acme/train.py:9"): "drift",
}


def megatron(folder: Path, files: dict[str, str]) -> Path:
    for path, source in files.items():
        target = folder / "megatron" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source)
    return folder


@pytest.fixture
def acme(tmp_path):
    root = tmp_path / "acme-repo"
    (root / "acme").mkdir(parents=True)
    (root / "acme" / "train.py").write_text(SOURCE)
    (root / "pyproject.toml").write_text("")
    megatron(tmp_path / "old", OLD)
    megatron(tmp_path / "new", NEW)
    return Project.at(root)


def checked(project, old="old", new="new", today=TODAY):
    base = project.root.parent
    cache = SummaryCache(base / "cache.sqlite")
    return check_source(project, parse_candidate(str(base / old)), parse_candidate(str(base / new)), today, cache)


def declare(project, body):
    project.data.mkdir(exist_ok=True)
    (project.data / "usage.toml").write_text(f"schema_version = 1\n{dedent(body)}")


def test_what_the_candidate_breaks_is_new_at_the_projects_line(acme):
    found = checked(acme)
    assert found.tier.ran
    assert {(f.title, f.source): f.level for f in found.findings} == RULES
    assert {f.state for f in found.findings} == {"new"}
    assert all(f.where is None or f.where.startswith("megatron/core/m.py:") for f in found.findings)


def test_what_both_sides_lack_is_not_held_against_the_candidate(acme):
    found = checked(acme, "new", "new")
    assert {f.state for f in found.findings} == {"same"}
    assert found.witnesses == {}
    assert {f.state for f in checked(acme, "new", "old").findings} == {"fixed"}


def verdict(found):
    green = side("1", cell("1")), side("2", cell("2"))
    return decide(*green, (found.tier, *RAN), found.findings)


def test_a_break_in_the_source_decides_whatever_the_cells_say(acme):
    answer, reason = verdict(checked(acme))
    assert answer is Verdict.BREAK
    assert reason.startswith("acme/train.py:")
    (acme.root / "acme" / "train.py").write_text(
        "from megatron.core.m import C\nclass Mine(C):\n    def old(self): ...\n"
    )
    answer, reason = verdict(checked(acme))
    assert answer is Verdict.DRIFT
    assert "acme/train.py:3: silent: core.m.C.old does not exist." in reason


EXPECTED = """
    [[expectation]]
    symbol = "megatron.core.m.*"
    reason = "the code is not used with this release"
    expires = 2030-01-01
"""


def test_an_expectation_with_a_reason_silences_findings(acme):
    declare(acme, EXPECTED)
    found = checked(acme)
    assert {f.level for f in found.findings} == {"info"}
    assert all("not used with this release" in f.message for f in found.findings)
    assert found.witnesses == {}
    assert verdict(found)[0] is Verdict.OK


@pytest.mark.parametrize("change", [("2030-01-01", "2028-01-01"), ("core.m.*", "core.nothing.*")])
def test_a_stale_expectation_is_red(acme, change):
    declare(acme, EXPECTED.replace(*change))
    found = checked(acme)
    [stale] = [f for f in found.findings if f.title == "usage-expectation-stale"]
    assert (stale.level, stale.source) == ("break", "compat_matrix/usage.toml:1")
    (acme.root / "acme" / "train.py").write_text("x = 1\n")
    assert verdict(checked(acme))[0] is Verdict.BREAK


def test_an_expectation_for_another_megatron_is_not_stale(acme):
    declare(acme, f'{EXPECTED}    against = "0.19.*"\n')
    found = checked(acme)
    assert {(f.title, f.source) for f in found.findings} == RULES.keys()


def test_only_the_folders_that_are_named_are_read(acme):
    declare(acme, 'include = ["other"]')
    assert not checked(acme).tier.ran
    (acme.root / "other").mkdir()
    (acme.root / "other" / "x.py").write_text("from megatron.core.m import gone\n")
    assert [f.source for f in checked(acme).findings] == ["other/x.py:1"]


def test_a_file_that_cannot_be_read_leaves_the_gate_inconclusive(acme):
    (acme.root / "acme" / "train.py").write_text("import megatron\nprint 'x'\n")
    found = checked(acme)
    assert [f.title for f in found.findings] == ["source-unread"]
    assert verdict(found)[0] is Verdict.UNPROVEN


def test_a_folder_that_is_not_a_project_is_not_read(acme):
    (acme.root / "pyproject.toml").unlink()
    away = replace(acme, data=acme.root.parent / "data")
    assert not checked(away).tier.ran


def test_witnesses_say_what_running_says(acme, tmp_path):
    found = checked(acme)
    assert {found.findings[place].title for place in found.witnesses} == {rule for rule, _ in RULES}
    lines = [*found.witnesses.values()]
    seen = []
    for name in ("old", "new"):
        binary = tmp_path / name / "venv" / "bin"
        binary.mkdir(parents=True)
        (tmp_path / name / "home").mkdir()
        path = tmp_path / name
        (binary / "python").write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} "$@"\n')
        (binary / "python").chmod(0o755)
        seen.append(run_witnesses(lines, read_sides(PROJECT, "0.18.0", "0.17.1", ()).matrix.cells[0], path, os.environ))
    assert [outcome.result for outcome in seen[0]] == ["pass"] * 4
    assert [outcome.result for outcome in seen[1]] == ["fail"] * 4
    assert all(judge_usage_witness(*pair) == "confirmed" for pair in zip(*seen, strict=True))


def test_a_witness_that_fails_on_the_baseline_too_shows_nothing():
    good, bad, lost = Outcome("pass"), Outcome("fail"), Outcome("error")
    assert judge_usage_witness(good, bad) == "confirmed"
    assert judge_usage_witness(good, good) == "refuted"
    assert judge_usage_witness(bad, bad) == "inconclusive"
    assert judge_usage_witness(lost, bad) == "inconclusive"
    assert judge_usage_witness(good, lost) == "inconclusive"


def gated(cells, source, monkeypatch, after="fail"):
    count = []

    def outcomes(lines, *_):
        count.append(len(lines))
        return [Outcome("pass" if len(count) == 1 else after) for _ in lines]

    monkeypatch.setattr(gate_run, "run_witnesses", outcomes)
    cells.runs.append({"0.17.1": cell("0.17.1"), "0.18.0": cell("0.18.0")})
    sides = read_sides(PROJECT, "0.18.0", "0.17.1", ())
    cpu, gpu = index_steps(cells.project, sides, RunOptions(), {}, has_gpu=False)
    steps = (replace(cpu, open_lane=lambda: cells.lane), gpu)
    return run_gate(sides, steps, no_display, {}, rerun=False, source=source, run_session=cells)


def test_the_gate_runs_the_witnesses_and_shows_the_findings(acme, tmp_path, monkeypatch):
    judged = gated(Cells(tmp_path), checked(acme), monkeypatch)
    gate = judged.gate
    assert gate.verdict is Verdict.BREAK
    assert gate.tiers[0].name == "usage"
    assert {f.witness for f in gate.findings if f.origin == "usage"} == {"confirmed"}
    folder = RunFolder(tmp_path / "reports" / gate.run_id, Scrubber({}))
    write_gate(folder, gate, judged.run.report, PROJECT.data)
    for name in ("gate.md", "report.html", "annotations.txt", "results.sarif", "gate.json"):
        assert "acme/train.py" in (folder.path / name).read_text(), name
    assert "missing-attribute: fails when called: core.m.gone does not exist." in text(gate)
    assert "at acme/train.py:6; upstream's megatron/core/m.py:1" in text(gate)
    assert "acme/train.py:5" in markdown(gate)
    assert "Correct the lines that the findings name" in gate.next_step


def test_a_refuted_finding_does_not_break(acme, tmp_path, monkeypatch):
    gate = gated(Cells(tmp_path), checked(acme), monkeypatch, after="pass").gate
    assert {f.weight for f in gate.findings if f.origin == "usage"} == {"drift"}
    assert gate.verdict is Verdict.DRIFT


def test_machines_are_pointed_into_the_projects_files(acme, tmp_path, monkeypatch):
    gate = gated(Cells(tmp_path), checked(acme), monkeypatch).gate
    results = json.loads(render_sarif(None, gate))["runs"][0]["results"]
    [found] = [r for r in results if r["ruleId"] == "missing-attribute"]
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "acme/train.py", "uriBaseId": "SOURCE"}
    assert place["region"] == {"startLine": 5}
    [call] = [r for r in results if r["ruleId"] == "call-does-not-fit" and "'k'" in r["message"]["text"]]
    assert call["relatedLocations"][0]["physicalLocation"]["artifactLocation"]["uriBaseId"] == "MEGATRON"
    assert any(line.startswith("::error file=acme/train.py,line=5,") for line in render_annotations(None, gate))


def test_the_gate_reads_this_projects_own_source():
    found = check_source(PROJECT, parse_candidate("0.18.2"), parse_candidate("0.19.2"), dt.date(2026, 1, 1))
    assert found.tier.ran
    assert "0 symbols" not in found.tier.note
    assert [f for f in found.findings if f.state == "new" and f.level != "info"] == []
