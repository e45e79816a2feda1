"""Runs pytest many times from one process that has imported the heavy packages once.

Started with an interpreter and the name of a place; reads one JSON job a line, forks a child for it at once, answers
with one JSON line when the child has ended. How many children there are is the caller's choice. Imports nothing of
this project before the fork, so that a child sees the copy it is given and no other.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def preload(place: str) -> None:
    """Import what a child would spend its time on."""
    warnings.simplefilter("ignore")
    names = {
        "harness": ["hypothesis", "pydantic", "typer", "rich", "griffe", "filelock", "packaging.version"],
        "unit": ["torch", "triton", "numpy", "hypothesis", "torch.utils.checkpoint", "torch.nested"],
    }.get(place, ["torch", "triton", "numpy", "hypothesis"])
    for name in ["pytest", "_pytest.unraisableexception", *names]:
        importlib.import_module(name)
    if place not in {"unit", "harness", "upstream"}:  # an edited megatron is imported by each child itself
        spec = importlib.util.spec_from_file_location(
            "_seam", TESTS.parent / "src" / "mcore_compat" / "testing" / "cpu_seam.py"
        )
        seam = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(seam)
        seam.install_cpu_seam()  # Megatron reads the device while it is imported
        for name in ["models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "distributed", "tensor_parallel.random"]:
            importlib.import_module(f"megatron.core.{name}")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    import hypothesis

    # No shrinking: that a fault is seen is asked for, not its smallest example.
    hypothesis.settings.register_profile(
        "faults",
        max_examples=20,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    ours = [name for name in sys.modules if name.split(".")[0] in {"mcore_fused", "mcore_compat"}]
    if ours:
        raise RuntimeError(f"imported too early: {ours}")


class Recorder:
    """What failed, and what ran."""

    def __init__(self) -> None:
        self.failed: list[list[str]] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
            # What another process raised is told at the end of a text that begins with its wrapper.
            telling = message[-1] if message[0].endswith("ProcessRaisedException:") else message[0]
            self.failed.append([report.nodeid, report.when, telling.strip()])
        elif report.when == "call" and report.passed:
            self.passed += 1


def child(job: dict) -> dict:
    """Run the selected checks against the copy; in the forked process."""
    import hypothesis
    import pytest

    os.chdir(job["work"])
    os.environ.update(job["env"])
    sys.path[:0] = [job["source"]]
    # Ranks are processes of their own, started by a server that sees the environment and not this path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [job["source"], os.environ.get("PYTHONPATH")]))
    hypothesis.settings.load_profile("faults")
    recorder = Recorder()
    quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins came before pytest
    status = pytest.main([*job["arguments"], *quiet], plugins=[recorder])
    strangers = [
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if name in {"mcore_fused", "mcore_compat"} and not str(module.__file__).startswith(job["source"])
    ]
    return {"status": int(status), "failed": recorder.failed, "passed": recorder.passed, "strangers": strangers}


class Children:
    """The forked children, each with its job; they end by themselves, or are killed at their limit."""

    def __init__(self) -> None:
        self._jobs: dict[int, tuple[dict, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def start(self, job: dict) -> None:
        """Fork a child for a job."""
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forking with threads; torch's are idle
            pid = os.fork()
        if pid == 0:
            _in_child(job)
        self._jobs[pid] = (job, started)

    def ended(self) -> Iterator[dict]:
        """The answers of those that have ended since the last call."""
        for pid, (job, started) in list(self._jobs.items()):
            done, _ = os.waitpid(pid, os.WNOHANG)
            late = not done and time.monotonic() > started + job["limit_s"]
            if late:
                self._kill(pid)
            if done or late:
                del self._jobs[pid]
                yield _answer(job, round(time.monotonic() - started, 2), late=late)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for pid in self._jobs:
            self._kill(pid)

    @staticmethod
    def _kill(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(job: dict, seconds: float, *, late: bool) -> dict:
    answer = {"id": job["id"], "seconds": seconds}
    if late:
        return answer | {"status": -1, "failed": [], "passed": 0, "why": "time"}
    try:
        return answer | json.loads(Path(job["result"]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        output = (
            Path(job["output"]).read_text(encoding="utf-8", errors="replace") if Path(job["output"]).exists() else ""
        )
        why = " | ".join(["the child left no result", *output.strip().splitlines()[-2:]])
        return answer | {"status": -1, "failed": [], "passed": 0, "why": why}


def _in_child(job: dict) -> None:
    with contextlib.suppress(BaseException):
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the jobs are not for the tests' own children
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        warnings.resetwarnings()
        try:
            Path(job["result"]).write_text(json.dumps(child(job)), encoding="utf-8")
        except BaseException:  # noqa: BLE001 - whatever ended the child is read from its output
            traceback.print_exc()
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not look like an answer
    preload(sys.argv[1])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    children, unread = Children(), b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02 if children else None)
        if readable:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                break
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                children.start(json.loads(line))
        for answer in children.ended():
            print(json.dumps(answer), file=answers, flush=True)
    children.kill_all()
    os._exit(0)  # unloading the packages takes seconds and proves nothing


if __name__ == "__main__":
    main()
