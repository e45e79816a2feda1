"""A project whose cells are judged by a stub that follows orders, on any node: what a cluster's tests run."""

import dataclasses
import json
import os
import signal
import time
import zipfile
from pathlib import Path

import harness_builders as build
from harness_project import REAL, FakeLane

from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.files.digest import digest_of_file
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.pipeline.session import RunOptions, prepare
from mcore_compat.project import Project
from mcore_compat.records import ProjectWheel

MATRIX = load_matrix(REAL / "matrix.toml")
SOURCES = Path(__file__).parents[3] / "src"
ORDERS = "orders.json"


class StubLane(FakeLane):
    """A lane without environments, on the caller's machine and on nodes."""

    @property
    def shipped(self):
        return {}

    def portable(self):
        return self

    def on_node(self, project, wheel, host, folders, work):
        assert not project.root.exists(), "a node must not need the caller's files"
        return dataclasses.replace(self, project=project, wheel=wheel)


def stub_wheel(folder):
    """The harness's sources as a wheel; made without a build."""
    path = Path(folder) / "mcore_compat-0.1.0-py3-none-any.whl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for source in sorted((SOURCES / "mcore_compat").rglob("*.py")):
                archive.write(source, source.relative_to(SOURCES).as_posix())
    return ProjectWheel("mcore-compat", "0.1.0", digest_of_file(path), None, path)


def stub_suite(cell, _environment, options, out, _host, cancel, on_progress):
    """Ends as the suite's orders say, after so many seconds, after having killed its worker so many times."""
    orders = json.loads((options.suite / ORDERS).read_text(encoding="utf-8"))
    mine = orders["cells"].get(cell.id, {})
    log = Path(orders["log"])
    _note(log, f"begun {cell.id} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}".strip())
    killed = log.with_name(f"killed-{cell.id}")
    if mine.get("kills", 0) > (len(killed.read_bytes()) if killed.exists() else 0):
        _note(killed, "", end="x")
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + mine.get("seconds", 0.0)
    while time.monotonic() < until and not cancel.wait(0.05):
        on_progress(1)
    if cancel.is_set():
        return build.suite_run(finished=build.finished(-15, cancelled=True))
    out.mkdir(parents=True, exist_ok=True)
    (out / "output.log").write_text(f"output of {cell.id}\n", encoding="utf-8")
    facts = build.suite_facts(cell.megatron_core, mode=cell.expected_mode)
    failed = {build.CHECKS[0]: "failed"} if mine.get("fails") else {}
    _note(log, f"ended {cell.id}")
    return build.suite_run(lines=build.log_lines(outcomes=failed), facts=facts)


def _note(path, line, end="\n"):
    """Append in one write, since several processes do."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}{end}".encode())
    os.close(handle)


def stub_project(folder, orders=None):
    """A project with the real matrix and a suite of orders; the log of its cells is ``folder/log``."""
    root = Path(folder) / "project"
    data = root / "compat_matrix"
    data.mkdir(parents=True)
    (data / "matrix.toml").write_bytes((REAL / "matrix.toml").read_bytes())
    (data / "expectations.toml").write_text("schema_version = 1\n", encoding="utf-8")
    entries = "".join(f'[[check]]\nid = "{check}"\n' for check in build.CHECKS)
    (data / "inventory.toml").write_text(f"schema_version = 1\n{entries}", encoding="utf-8")
    suite = root / "tests" / "compat"
    suite.mkdir(parents=True)
    (suite / "test_a.py").write_text("", encoding="utf-8")
    (suite / ORDERS).write_text(json.dumps({"log": str(Path(folder) / "log"), "cells": orders or {}}), encoding="utf-8")
    return root


def stub_session(root, cells=None, resumed=None, **options):
    """A prepared run of stub cells."""
    project = Project.at(root)
    lane = StubLane(project, wheel=stub_wheel(root.parent / "wheel"))
    known = load_classified_matrix(project.data)
    cells = [known.cell(cell.id) or cell for cell in cells or MATRIX.cells]
    return prepare(project, cells, RunOptions(**options), lane, dict(os.environ), resumed=resumed, suite=stub_suite)


def ended_cells(root):
    """The cells whose suite came to its end, as often as it did."""
    log = root.parent / "log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return sorted(line.split()[1] for line in lines if line.startswith("ended"))
