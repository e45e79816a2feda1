"""Runs pytest many times from one process that has imported the heavy packages once.

Started with an interpreter and the name of a place; reads one JSON job a line, forks a child for it, answers with one
JSON line. Imports nothing of this project before the fork, so that a child sees the copy it is given and no other.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
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
    if place not in {"unit", "harness"}:
        spec = importlib.util.spec_from_file_location("_seam", TESTS / "compat" / "support" / "cpu_seam.py")
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
            message = (crash.message if crash else str(report.longrepr)).strip().splitlines()
            self.failed.append([report.nodeid, report.when, message[0] if message else ""])
        elif report.when == "call" and report.passed:
            self.passed += 1


def child(job: dict) -> dict:
    """Run the selected checks against the copy; in the forked process."""
    import hypothesis
    import pytest

    os.chdir(job["work"])
    os.environ.update(job["env"])
    sys.path[:0] = [job["source"]]
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


def run(job: dict) -> dict:
    """Fork, wait, and kill what takes too long."""
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forking with threads; torch's are idle
        pid = os.fork()
    if pid == 0:
        _in_child(job)
    limit = started + job["limit_s"]
    while True:
        done, _ = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > limit:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"id": job["id"], "status": -1, "failed": [], "passed": 0, "seconds": job["limit_s"], "why": "time"}
        time.sleep(0.02)
    answer = {"id": job["id"], "seconds": round(time.monotonic() - started, 2)}
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
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # unloading the packages takes seconds and proves nothing


if __name__ == "__main__":
    main()
