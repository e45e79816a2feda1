"""The GPU lane around its cells: what it measures and advises, who takes which card, when a fault counts as caught."""

import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_compat.cli.gpu import fault_caught
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.expectations import Expectation, Expectations, load_expectations
from mcore_compat.matrix.inventory import load_inventory
from mcore_compat.pipeline.lanes import ImageLane
from mcore_compat.pipeline.one_cell import measured
from mcore_compat.project import Project
from mcore_compat.provision.host_image import Image
from mcore_compat.provision.wheelhouse import Wheelhouse
from mcore_compat.records import ProjectWheel
from mcore_compat.results import CellResult, MegatronCore, Report, SubjectInfo
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]


def _lane(tmp_path, gpus=(), host=None, variables=None):
    house = Wheelhouse(tmp_path, "3.12", "x86_64", (), (), {})
    wheel = ProjectWheel(name="mcore-compat", version="0.1.0", sha256="", commit=None, wheel=tmp_path)
    return ImageLane(
        Project.at(tmp_path), Image((), {}, "", gpus), house, tmp_path, wheel, tmp_path, host or {},
        variables=variables or {},
    )  # fmt: skip


def _cell(name, verdict, *findings):
    return CellResult(
        id=name,
        megatron_core=MegatronCore(requested=name),
        contract_class="c",
        lane="gpu",
        expected_mode="hook",
        verdict=verdict,
        findings=findings,
    )


def _report(*cells):
    return Report(
        run_id="r", started="s", seconds=1, verdict=Verdict.OK, suite_sha256="", profile="gpu",
        subject=SubjectInfo(name="n", version="v", sha256="h"), planned=(), cells=cells,
    )  # fmt: skip


def test_what_a_check_measured_is_told_once_and_held_against_nobody(tmp_path):
    log = tmp_path / "reportlog.jsonl"
    entry = {"nodeid": "test_a.py::test_b[x]", "user_properties": [["peak", "5 MB"]]}
    lines = [json.dumps({**entry, "when": when}) for when in ("setup", "call", "teardown")]
    log.write_text("\n".join([*lines, "{broken"]))
    (finding,) = measured(log)
    assert finding.message == "peak: 5 MB"
    assert finding.check == "test_a.py::test_b"
    assert finding.verdict is None
    assert measured(tmp_path / "nothing") == ()


def test_advice_leads_to_a_cell_that_still_exists(tmp_path):
    cell = load_matrix(ROOT / "compat_matrix" / "matrix.toml").cells[-1]
    lane = _lane(tmp_path)
    assert f"`ci/gpu --select {cell.id}`" in lane.rerun(cell, "a.py::test_b")
    side = cell.model_copy(update={"id": "candidate"})
    assert "the same command" in lane.rerun(side, "a.py::test_b")


def test_cells_of_one_rank_take_turns_on_the_gpus(tmp_path):
    two = _lane(tmp_path, ("a", "b"))
    assert [two.gpu_of(place)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == ["0", "1", "0"]
    assert _lane(tmp_path, ("a",)).gpu_of(1) == {}
    assert _lane(tmp_path, ("a", "b"), {"CUDA_VISIBLE_DEVICES": "1"}).gpu_of(0) == {}
    assert _lane(tmp_path, ("a", "b"), variables={"MCORE_COMPAT_NPROC": "2"}).gpu_of(0) == {}


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((Verdict.BREAK, Verdict.UNPROVEN), 0),
        ((Verdict.BREAK, Verdict.OK), 1),
        ((Verdict.DRIFT,), 1),
        ((), 1),
    ],
)
def test_a_fault_is_caught_only_by_all(verdicts, code):
    cells = [_cell(f"0.1{place}.0", verdict) for place, verdict in enumerate(verdicts)]
    assert fault_caught(_report(*cells)) == code


def _ci_gpu(*arguments, path=""):
    env = {"PATH": path, "HOME": os.environ.get("HOME", "/")}
    command = [sys.executable, str(ROOT / "ci" / "gpu"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)


def test_no_bundle_and_nothing_to_make_it_with(tmp_path):
    done = _ci_gpu("--bundle", str(tmp_path / "none"), path=str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.splitlines()[0].startswith("error: There is no bundle")
    assert len(done.stderr.splitlines()) == 2


def test_a_damaged_bundle_is_refused_before_anything_runs(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    wheel = {"filename": "a-1-py3-none-any.whl", "sha256": "0" * 64, "size": 1, "origin": "index"}
    content = {"python": "3.12", "machine": "x86_64", "harness": [wheel], "suite": [], "cells": {}}
    (folder / "manifest.json").write_text(json.dumps(content))
    (folder / "a-1-py3-none-any.whl").write_bytes(b"x")
    done = _ci_gpu(f"--bundle={folder}", path=os.defpath)
    assert done.returncode == 3
    assert "a-1-py3-none-any.whl is not the file that the manifest names" in done.stderr
    shutil.rmtree(folder)


_ENDED_POLITELY = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
_OUTER = """
import importlib.machinery, importlib.util, os, sys
loader = importlib.machinery.SourceFileLoader("ci_gpu", sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("ci_gpu", loader))
loader.exec_module(module)
sys.exit(module._run([sys.executable, "-c", sys.argv[2], sys.argv[3]], dict(os.environ)))
"""


def test_a_request_to_end_reaches_the_process_that_owns_the_cells(tmp_path):
    """`timeout` and CI's cancelling end the outer process; its cells must not go on holding the GPU."""
    ready = tmp_path / "ready"
    arguments = [sys.executable, "-c", _OUTER, ROOT / "ci" / "gpu", _ENDED_POLITELY, ready]
    outer = subprocess.Popen(arguments, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    while not ready.exists():
        assert outer.poll() is None
        time.sleep(0.02)
    outer.terminate()
    assert outer.wait(timeout=20) == 7


def test_an_exception_of_another_suite_is_no_stale_entry_of_this_one():
    """One expectations.toml serves the property suite and the lane, whose checks are others."""
    given = {
        "cell": "0.18.2",
        "kind": "fail",
        "failure": "TypeError: x",
        "reason": "upstream is broken there",
        "expires": dt.date(2100, 1, 1),
    }
    entries = [
        Expectation(check=check, link="https://example.org/1", **given)
        for check in ("test_mtp.py::test_recompute", "test_lane_numbers.py::test_outputs")
    ]
    everything = Expectations(schema_version=1, expectation=tuple(entries))
    assert everything.about({"test_lane_numbers.py::test_outputs"}).expectation == (entries[1],)


def test_the_committed_exceptions_leave_the_lane_alone():
    """What the lane does not run cannot be expected of it, and each entry is about a check that some suite declares."""
    folder = ROOT / "compat_matrix"
    expected = load_expectations(folder / "expectations.toml")
    suites = [
        load_inventory(folder / name) for name in ("inventory.toml", "inventory-gpu.toml", "inventory-parallel.toml")
    ]
    declared = [{check.id for check in suite.check} for suite in suites]
    assert all(any(entry.check in checks for checks in declared) for entry in expected.expectation)
    for checks in declared[1:]:
        assert all(entry.check in checks for entry in expected.about(checks).expectation)
