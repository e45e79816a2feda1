"""Where faults are looked for: interpreters, and the forking worker of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from catalogue import ROOT, Fault

LIMIT_S = 300
CONTROL_LIMIT_S = 900
# The release that stands for each kind of cell; unit tests run in the harness's own environment.
RELEASES = {"0.18": "0.18.2", "0.17": "0.17.1"}
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
    made = _provisioned(missing, cells) if missing else {}
    found |= {place: made[release] for place, release in RELEASES.items() if place not in found and release in made}
    for place in wanted - {"run"}:
        if not found[place].exists():
            raise NoPlaceError(f"there is no interpreter {found[place]} for {place}")
    return found


def _provisioned(releases: set[str], cells: Path) -> dict[str, Path]:
    """Interpreters of cells, made or reused and proved by the harness itself."""
    from filelock import FileLock

    from mcore_compat.matrix import load_matrix
    from mcore_compat.provision import provision
    from mcore_compat.subject import build_subject
    from mcore_compat.uv import Uv

    matrix = load_matrix(ROOT / "compat_matrix" / "matrix.toml")
    uv = Uv.find(os.environ)
    cells.mkdir(parents=True, exist_ok=True)
    subject = build_subject(ROOT, cells / ".subject", uv)
    found = {}
    for cell in (cell for cell in matrix.cells if cell.id in releases):
        with FileLock(cells / f"{cell.id}.lock"):
            made = provision(
                cell, matrix.requirements, subject, cells, uv, uv.interpreter(cell.python), os.environ
            )  # fmt: skip
        if made.environment is None:
            raise NoPlaceError(f"cell {cell.id}: {made.reason} {made.next_step}")
        found[cell.id] = made.environment.python
    return found


def plant_all(place: str, faults: Iterable[Fault], python: Path, scratch: Path) -> list[Outcome]:
    """Plant one fault after the other and run what must catch it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MCORE_", "PYTEST_"))}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_CUDA_ARCH_LIST": "9.0", "PYTHONDONTWRITEBYTECODE": "1"}
    if place == "unit":
        env["TRITON_INTERPRET"] = "1"
    errors = scratch / "worker.txt"
    with (
        errors.open("w") as log,
        subprocess.Popen(
            [python, WORKER, place], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as worker,
    ):
        if not worker.stdout.readline():
            raise NoPlaceError(f"the worker of {place} does not start: {errors.read_text()[-2000:]}")
        # The worker ends when its input does, which leaving this block closes.
        return [_plant(fault, worker, scratch / str(number)) for number, fault in enumerate(faults)]


def _plant(fault: Fault, worker: subprocess.Popen[str], folder: Path) -> Outcome:
    source, work = folder / "src", folder / "work"
    work.mkdir(parents=True)
    if fault.replace:
        fault.plant(source)
    else:
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    job = {
        "id": fault.id,
        "source": str(source),
        "work": str(work),
        "env": {"HYPOTHESIS_PROFILE": "faults", "CI": "1", "TMPDIR": str(work), **fault.env},
        "arguments": _arguments(fault, folder),
        "result": str(folder / "result.json"),
        "output": str(folder / "output.txt"),
        "limit_s": LIMIT_S if fault.replace else CONTROL_LIMIT_S,
    }
    worker.stdin.write(json.dumps(job) + "\n")
    worker.stdin.flush()
    answer = json.loads(worker.stdout.readline() or '{"status": -1, "failed": [], "why": "the worker died"}')
    outcome = judged(fault, answer)
    if outcome.caught:
        shutil.rmtree(folder)
    return outcome


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
