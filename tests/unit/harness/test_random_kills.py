"""Runs that are killed at random moments lose no cell, judge none twice, and leave no process behind."""

import os
import random
import secrets
import signal
import sys
import time
from pathlib import Path

import harness_builders as build
import pytest
from harness_project import run

from mcore_compat.errors import UsageError
from mcore_compat.provision.process import run_logged
from mcore_compat.verdicts import Verdict

KILLS = 60
WAITS = 50
NOTHING_TO_RESUME = 2
LIMIT_S = 150
# A daemon of its own session, and a child that would go on for a minute.
CELL = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ntime.sleep({seconds})\n"


def suite_in(log):
    """A suite of real processes that takes a moment, and notes when a cell has come to its end."""

    def suite(cell, _environment, _options, out, _host, cancel, _on_progress):
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", "-c", CELL.format(seconds=random.uniform(0.0, 0.1))]
        env = {"MCORE_COMPAT_KILLED": str(log)}
        # A name for each attempt, as the real runner has a folder for each: the last one's supervisor may still end.
        output = out / f"output-{secrets.token_hex(4)}.log"
        done = run_logged(command, cwd=out, env=env, log=output, limit_s=30, cancel=cancel)
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"{cell.id}\n")
        facts = build.suite_facts(cell.megatron_core, mode=cell.expected_mode)
        return build.suite_run(facts=facts, finished=done)

    return suite


def forked(work):
    """A process of its own that does the work; 0: it ended, 1: it raised."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except UsageError as exc:
        os._exit(NOTHING_TO_RESUME if "no interrupted run" in exc.problem else 1)
    finally:
        os._exit(1)


def unfinished(project):
    """Folders of runs without a report."""
    return [path.parent for path in project.glob("reports/*/run.json") if not (path.parent / "report.json").exists()]


def still_there(log):
    """Processes of any of the cells."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(log).encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
                found += [entry.name] * (state not in "ZX")
        except OSError:
            continue
    return found


@pytest.mark.timeout(2 * LIMIT_S)
def test_random_kills_lose_no_cell_double_none_and_leave_no_process(project, tmp_path):
    seed = random.randrange(1 << 30)
    random.seed(seed)
    log = tmp_path / "ended"
    log.touch()
    kills = runs = waits = 0
    begun = time.monotonic()
    while kills < KILLS and time.monotonic() - begun < LIMIT_S:
        resume = runs > 0
        runs += 1
        child = forked(lambda resume=resume: run(project, resume=resume, suite=suite_in(log)))
        time.sleep(random.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
            continue
        if os.WEXITSTATUS(status) == NOTHING_TO_RESUME:
            # The run before was killed before its folder was there, or its last child has not quite ended.
            runs = 0 if not unfinished(project) else runs
            waits += 1
            assert waits < WAITS, f"seed {seed}: an unfinished run is never resumed"
            time.sleep(0.1)
            continue
        # It came to its end before the signal; the report was not yet written, so the next one finds all its cells.
        assert os.WEXITSTATUS(status) == 0, f"seed {seed}"
        for report in project.glob("reports/*/run.json"):
            (report.parent / "report.json").touch()
        runs = 0
    assert kills >= 50, f"only {kills} kills in {LIMIT_S} s"
    try:
        report, recorder = run(project, resume=runs > 0, suite=suite_in(log))
    except UsageError:
        report, recorder = run(project, suite=suite_in(log))
    assert report.verdict is Verdict.OK, f"seed {seed}: {[(c.id, c.reason) for c in report.cells]}"
    assert [cell.id for cell in report.cells] == list(report.planned)
    assert sorted(recorder.judged) == sorted(report.planned)
    until = time.monotonic() + 10
    while (left := still_there(log)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == [], f"seed {seed}"
    assert not list((project / "reports").rglob("attempt-*"))
    assert not list((project / "reports").rglob(".result*"))
