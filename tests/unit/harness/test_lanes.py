"""The index lane: the command that runs a check again, and waiting for another run's environment."""

import threading
import time
from pathlib import Path

import harness_builders as build
import pytest
from filelock import FileLock

from mcore_compat.errors import LockTimeoutError
from mcore_compat.pipeline import lanes
from mcore_compat.pipeline.lanes import IndexLane
from mcore_compat.project import Project
from mcore_compat.records import ProjectWheel
from mcore_compat.subjects.selection import OURS, choose_subject

CHECK = "test_a.py::test_one"


def lane(root, subject=OURS, **places):
    wheel = ProjectWheel("mcore-compat", "0.1.0", "ab" * 32, None, Path("x.whl"))
    return IndexLane(Project.at(root).with_paths(**places), (), None, wheel, {}, subject)


def test_a_check_is_run_again_with_the_cell_s_variables_and_without_leaving_a_cache(tmp_path):
    cell = build.cell(env=[{"name": "A_FLAG", "value": "1", "reason": "it needs the flag"}])
    assert lane(tmp_path).rerun(cell, CHECK) == (
        f"Run it again: `A_FLAG=1 .cells/0.18.2/venv/bin/python -m pytest -p no:cacheprovider tests/compat/{CHECK}`."
    )


def test_every_variable_of_the_cell_is_in_the_command(tmp_path):
    env = [{"name": name, "value": "1", "reason": "it needs the flag"} for name in ("FIRST", "SECOND")]
    said = lane(tmp_path).rerun(build.cell(env=env), CHECK)
    assert said.startswith("Run it again: `FIRST=1 SECOND=1 .cells/0.18.2/")


def test_another_subject_another_suite_and_another_folder_are_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\n", encoding="utf-8")
    chosen = choose_subject(f"{file}:Mine")
    said = lane(tmp_path, chosen, suite=tmp_path / "checks", cells=tmp_path / "envs").rerun(build.cell(), CHECK)
    assert "MCORE_COMPAT_SUBJECT=mine.py:Mine " in said
    assert " envs/0.18.2/venv/bin/python " in said
    assert f" checks/{CHECK}`" in said


def test_a_cell_that_another_run_has_is_waited_for_and_said(tmp_path):
    said, cancel = [], threading.Event()
    (tmp_path / ".cells").mkdir()
    other = FileLock(tmp_path / ".cells" / "0.18.2.lock", thread_local=False)
    other.acquire()
    threading.Timer(0.7, other.release).start()
    with lane(tmp_path).hold(build.cell(), cancel, said.append) as held:
        assert held
    assert said == ["waiting: another run is using this cell's environment"]


def test_a_run_that_waits_can_be_interrupted(tmp_path):
    cancel = threading.Event()
    (tmp_path / ".cells").mkdir()
    with FileLock(tmp_path / ".cells" / "0.18.2.lock"):
        threading.Timer(0.2, cancel.set).start()
        started = time.monotonic()
        with lane(tmp_path).hold(build.cell(), cancel, lambda _: None) as held:
            assert not held
        assert time.monotonic() - started < 5


def test_waiting_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "_LOCK_LIMIT_S", 1)
    (tmp_path / ".cells").mkdir()
    with (
        FileLock(tmp_path / ".cells" / "0.18.2.lock"),
        pytest.raises(LockTimeoutError, match="using this cell's environment"),
        lane(tmp_path).hold(build.cell(), threading.Event(), lambda _: None),
    ):
        pytest.fail("it was given")
