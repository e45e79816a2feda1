"""Where faults are looked for: interpreters, and the forking worker of each."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from catalogue import ROOT, Fault

LIMIT_S = 300
CONTROL_LIMIT_S = 900
# The release that stands for each kind of cell; unit tests run in the harness's own environment.
RELEASES = {"0.19": "0.19.2", "0.18": "0.18.2", "0.17": "0.17.1", "upstream": "0.18.2"}
WORKER = Path(__file__).with_name("worker.py")


class NoPlaceError(Exception):
    """An interpreter is missing, or its worker does not start."""


@dataclass(frozen=True)
class Outcome:
    """How one planted fault ended.

    Attributes:
        caught: a check that the catalogue names failed (or, for the control, nothing failed).
        by: the check, or what happened instead.
    """

    fault: Fault
    caught: bool
    by: str
    seconds: float
    message: str = ""


def interpreters(wanted: set[str], given: Mapping[str, str], cells: Path) -> dict[str, Path]:
    """An interpreter for every place: the one given, or that of a cell which the harness provides."""
    here = dict.fromkeys(("harness", "unit"), Path(sys.executable))
    found = here | {place: Path(path) for place, path in given.items()}
    missing = {RELEASES[place] for place in wanted - found.keys() if place in RELEASES}
    if "run" in wanted:
        missing.add(RELEASES["0.18"])  # so that making it is not on the clock of the first run
    made = _made(missing, cells) if missing else {}
    found |= {place: made[release] for place, release in RELEASES.items() if place not in found and release in made}
    for place in wanted - {"run"}:
        if not found[place].exists():
            raise NoPlaceError(f"there is no interpreter {found[place]} for {place}")
    return found


def _made(releases: set[str], cells: Path) -> dict[str, Path]:
    """Interpreters of cells, made or reused and proved by the harness itself."""
    from mcore_compat.errors import McoreCompatError
    from mcore_compat.project import Project
    from mcore_compat.provision.ensure import ensure_environments

    try:
        return {
            cell: made.python
            for cell, made in ensure_environments(
                Project.at(ROOT).with_paths(cells=cells), releases, os.environ
            ).items()
        }
    except McoreCompatError as exc:
        raise NoPlaceError(str(exc)) from exc


class Lane:
    """The forking worker of one place; any number of threads plant through it, and each fault gets its own child."""

    def __init__(self, place: str, python: Path, scratch: Path) -> None:
        """Start the worker; its imports go on while the caller does.

        Args:
            place: name of the place.
            python: its interpreter.
            scratch: an empty folder for copies and results.
        """
        env = {n: value for n, value in os.environ.items() if not n.startswith(("PYTHON", "MCORE_", "PYTEST_"))}
        env |= {"OMP_NUM_THREADS": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
        if place == "unit":
            env["TRITON_INTERPRET"] = "1"
        self._place, self._scratch = place, scratch
        self._site = next((python.parent.parent / "lib").glob("python*/site-packages"), None)
        self._errors = scratch / "worker.txt"
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._dead = False
        self._waiting: dict[int, queue.SimpleQueue[dict[str, object]]] = {}
        with self._errors.open("w") as log:
            self._worker = subprocess.Popen(
                [python, WORKER, place], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def plant(self, fault: Fault) -> Outcome:
        """Plant one fault in a copy and run what must catch it.

        Raises:
            NoPlaceError: the worker does not start.
        """
        self._ready.wait()
        if self._dead:
            raise NoPlaceError(f"the worker of {self._place} has ended: {self._errors.read_text()[-2000:]}")
        number = next(self._numbers)
        folder = self._scratch / str(number)
        job = _job(number, fault, folder, self._site)
        answered: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        with self._lock:
            self._waiting[number] = answered
            if self._dead:
                answered.put(_DEAD)
            else:
                self._worker.stdin.write(json.dumps(job) + "\n")
                self._worker.stdin.flush()
        outcome = judged(fault, answered.get())
        if outcome.caught:
            shutil.rmtree(folder)
        return outcome

    def close(self) -> None:
        """End the worker: it ends when its input does."""
        self._worker.stdin.close()
        self._worker.wait()

    def _listen(self) -> None:
        """Hand every answer to the thread that waits for it; none waits for a worker that has died."""
        for line in self._worker.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set()
            else:
                self._waiting.pop(answer["id"]).put(answer)
        with self._lock:
            self._dead = True
            for answered in self._waiting.values():
                answered.put(_DEAD)
        self._ready.set()


_DEAD: Mapping[str, object] = {"status": -1, "failed": [], "why": "the worker died"}


def _job(number: int, fault: Fault, folder: Path, site: Path | None) -> dict[str, object]:
    source, work = folder / "src", folder / "work"
    work.mkdir(parents=True)
    if fault.replace and fault.place != "upstream":
        fault.plant(source)
    else:
        shutil.copytree(ROOT / "src", source)
    if fault.replace and fault.place == "upstream":
        fault.plant_upstream(source, site)
    return {
        "id": number,
        "source": str(source),
        "work": str(work),
        "env": {"HYPOTHESIS_PROFILE": "faults", "CI": "1", "TMPDIR": str(work), **fault.env},
        "arguments": _arguments(fault, folder),
        "result": str(folder / "result.json"),
        "output": str(folder / "output.txt"),
        "limit_s": LIMIT_S if fault.replace else CONTROL_LIMIT_S,
    }


def _arguments(fault: Fault, folder: Path) -> list[str]:
    nodes = [str(ROOT / "tests" / check) for check in fault.caught_by]
    stop = ["-x"] if fault.replace else []
    if fault.place in {"unit", "harness"}:
        return [*nodes, *stop, "-q", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"]
    settings = folder / "pytest.ini"  # as the harness does: the suite in a cell gets no settings of the checkout
    settings.write_text("[pytest]\n", encoding="utf-8")
    return [*nodes, *stop, "-q", "-c", str(settings), f"--rootdir={ROOT / 'tests' / 'compat'}"]


def judged(fault: Fault, answer: Mapping[str, object]) -> Outcome:
    """Caught only if pytest ran to a failure of a check that the catalogue names, on the copy and nothing else."""
    status, seconds = answer["status"], float(answer.get("seconds", 0.0))
    failed = list(answer["failed"])
    tail = str(answer.get("why", ""))
    if answer.get("strangers"):
        return Outcome(fault, False, f"another copy was imported: {answer['strangers']}", seconds)
    if not fault.replace:
        names = ", ".join(node for node, *_ in failed)
        return Outcome(fault, status == 0, names or f"{answer.get('passed', 0)} cases" + tail, seconds)
    if status != 1 or not failed:
        return Outcome(fault, False, tail or f"pytest ended with status {status}", seconds)
    node, when, message = failed[0]
    check = node.split("[")[0]
    if not any(_is_part(check, named) for named in fault.caught_by):
        return Outcome(fault, False, f"failed elsewhere: {check}: {message}", seconds, message)
    return Outcome(fault, True, Path(check).name + ("" if when == "call" else f" ({when})"), seconds, message)


def _is_part(check: str, named: str) -> bool:
    """Whether a failing check is the named one, or inside the named file or class; paths differ in their root."""
    file, _, inside = check.partition("::")
    named_file, _, named_inside = named.partition("::")
    return Path(file).name == Path(named_file).name and f"{inside}::".startswith(
        f"{named_inside}::" * bool(named_inside)
    )
