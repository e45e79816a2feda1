"""Makes a cell's environment, or finds it made, and proves that it is the one asked for.

One folder a cell: ``<cells>/<id>/`` with ``venv``, ``home``, ``lock.txt`` and ``state.json``. uv links files from its
cache, so a further environment costs neither time nor disk as long as both lie on one filesystem; files inside are
therefore never edited in place.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.errors import InfrastructureError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.source import local_path
from mcore_compat.provision import probe
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.provision.recipe import Recipe, recipe_of
from mcore_compat.provision.uv import Uv, UvFailure
from mcore_compat.provision.verify import problems
from mcore_compat.records import Environment, EnvironmentFacts, ProjectWheel, Provisioned
from mcore_compat.verdicts import Verdict

__all__ = ["provision"]

# Generous: on a host that is busy with other work an import of torch and megatron has taken five minutes.
_PROBE_LIMIT_S = 900
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", re.MULTILINE)


class _State(BaseModel):
    """What is remembered of an environment between runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: str
    subject_sha256: str
    facts: EnvironmentFacts


@dataclass
class _Refused(Exception):  # noqa: N818  carries a verdict to this module's one boundary
    verdict: Verdict
    reason: str
    next_step: str
    details: str = field(default="")


def provision(
    cell: Cell,
    common: tuple[str, ...],
    subject: ProjectWheel,
    cells: Path,
    uv: Uv,
    interpreter: Path,
    host: Mapping[str, str],
) -> Provisioned:
    """Make or reuse the environment of ``cell`` below ``cells``. The caller holds the cell's lock.

    Requirements that cannot be resolved or built give ``unresolvable``; a proof that fails, a network or a disk that
    is missing give ``infra``. Neither raises, so that the other cells go on.
    """
    started = time.monotonic()
    try:
        environment = _made(cell, common, subject, cells / cell.id, uv, interpreter, host)
    except _Refused as exc:
        return Provisioned(time.monotonic() - started, None, exc.verdict, exc.reason, exc.next_step)
    except (OSError, InfrastructureError) as exc:
        problem = exc.problem if isinstance(exc, InfrastructureError) else f"{exc.strerror} ({exc.filename})"
        return Provisioned(
            time.monotonic() - started,
            None,
            Verdict.INFRA,
            f"the environment could not be made: {problem}",
            "Look at the disk and its permissions, then run again.",
        )
    return Provisioned(time.monotonic() - started, environment)


def _made(
    cell: Cell,
    common: tuple[str, ...],
    subject: ProjectWheel,
    folder: Path,
    uv: Uv,
    interpreter: Path,
    host: Mapping[str, str],
) -> Environment:
    path = local_path(cell.source) if cell.source is not None else None
    if path is not None and not path.exists():
        raise _Refused(
            Verdict.UNRESOLVABLE,
            f"the cell's source {path.name} is not there",
            f"Put it there, or correct `source` of cell {cell.id}.",
        )
    recipe = recipe_of(cell, common)
    state = _remembered(folder)
    reusable = cell.source is None or recipe.source_digest is not None
    if state is not None and state.identity == recipe.identity and reusable:
        if state.subject_sha256 != subject.sha256:
            _forget(folder)
            _install_subject(folder, subject, uv)
        lock = (folder / "lock.txt").read_text(encoding="utf-8")
        # The probe without imports: hashes of all files again, against the facts of the first, full proof.
        facts = _probed(cell, folder, host, deep=False).model_copy(update={"imported": state.facts.imported})
        if not problems(cell, facts, _pins(lock), subject.version):
            _remember(folder, _State(identity=recipe.identity, subject_sha256=subject.sha256, facts=facts))
            return Environment(folder, facts, lock, reused=True)
    _create(recipe, folder, uv, interpreter)
    _install_subject(folder, subject, uv)
    lock = (folder / "lock.txt").read_text(encoding="utf-8")
    facts = _probed(cell, folder, host, deep=True)
    wrong = problems(cell, facts, _pins(lock), subject.version)
    if wrong:
        raise _Refused(
            Verdict.INFRA,
            "the environment is not the one asked for: " + "; ".join(wrong),
            f"Remove {folder.parent.name}/{folder.name} and run again; if it comes back, correct the cell's recipe.",
        )
    _remember(folder, _State(identity=recipe.identity, subject_sha256=subject.sha256, facts=facts))
    return Environment(folder, facts, lock, reused=False)


def _create(recipe: Recipe, folder: Path, uv: Uv, interpreter: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "home").mkdir(parents=True)
    (folder / "requirements.in").write_text("\n".join(recipe.requirements) + "\n", encoding="utf-8")
    (folder / "constraints.in").write_text("\n".join(recipe.constraints) + "\n", encoding="utf-8")
    # Nothing runs code of a package before it is installed, unless the cell says so.
    build = ["--only-binary", ":all:"] + (["--no-binary", "megatron-core"] if recipe.build_megatron else [])
    fresh = ["--refresh-package", "megatron-core"] if recipe.build_megatron and recipe.source_digest is None else []
    python: tuple[str | Path, ...] = ("-p", folder / "venv" / "bin" / "python")
    try:
        uv.call(["venv", "-q", "--no-project", "-p", interpreter, folder / "venv"])
        uv.call(
            [
                *("pip", "compile", "-q", "--no-header", "--no-annotate", "--generate-hashes", *build, *fresh, *python),
                *("-c", "constraints.in", "-o", "lock.txt", "requirements.in"),
            ],
            cwd=folder,
        )
        uv.call(["pip", "install", "-q", *build, *python, "-r", "lock.txt"], cwd=folder)
        if recipe.without_dependencies:
            _install_alone(recipe.without_dependencies, folder, uv, python)
    except UvFailure as exc:
        raise _refusal(exc) from exc


def _install_alone(specs: tuple[str, ...], folder: Path, uv: Uv, python: tuple[str | Path, ...]) -> None:
    """Packages without theirs, wheels only; what was locked is added to the lock."""
    (folder / "alone.in").write_text("\n".join(specs) + "\n", encoding="utf-8")
    alone = ("--no-deps", "--only-binary", ":all:", *python)
    compiled = ("pip", "compile", "-q", "--no-header", "--no-annotate", "--generate-hashes", *alone)
    uv.call([*compiled, "-o", "alone.txt", "alone.in"], cwd=folder)
    uv.call(["pip", "install", "-q", *alone, "-r", "alone.txt"], cwd=folder)
    with (folder / "lock.txt").open("a", encoding="utf-8") as lock:
        lock.write((folder / "alone.txt").read_text(encoding="utf-8"))


def _refusal(exc: UvFailure) -> _Refused:
    if exc.host_at_fault:
        return _Refused(
            Verdict.INFRA,
            f"the index or the disk failed: {exc.reason}",
            "Check the network and the disk; what is in uv's cache installs without network.",
        )
    if "no usable wheels" in exc.reason or "Failed to build" in exc.reason:
        step = "A build from source needs the cell's allow_sdist with a reason, and a C++ compiler on this host."
    else:
        step = "Change the cell's requirements or constraints."
    return _Refused(Verdict.UNRESOLVABLE, exc.reason, step)


def _install_subject(folder: Path, subject: ProjectWheel, uv: Uv) -> None:
    try:
        uv.call(
            [
                *("pip", "install", "-q", "--offline", "--no-deps", "--reinstall", "-p"),
                folder / "venv" / "bin" / "python",
                subject.wheel,
            ]
        )
    except UvFailure as exc:
        raise _Refused(
            Verdict.INFRA, f"the subject's wheel does not install: {exc.reason}", "Build it by hand with `uv build`."
        ) from exc


def _probed(cell: Cell, folder: Path, host: Mapping[str, str], *, deep: bool) -> EnvironmentFacts:
    """The probe's facts, from a process with a clean environment in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="mcore-compat-probe-") as empty:
        env = cell_environment(host, cell, home=folder / "home", temporary=Path(empty))
        command = [str(folder / "venv" / "bin" / "python"), "-I", probe.__file__, *(["--import"] if deep else [])]
        try:
            done = subprocess.run(
                command,
                cwd=empty,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_PROBE_LIMIT_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise _Refused(
                Verdict.INFRA, f"the proof did not end within {_PROBE_LIMIT_S} s", "Look at the load of the host."
            ) from exc
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise _Refused(
            Verdict.INFRA,
            f"`import {probe.DEEP_MODULE}` fails in the new environment: {lines[-1] if lines else 'no output'}",
            "Give the cell the requirement or the variable that this release needs.",
        )
    try:
        return EnvironmentFacts.model_validate_json(done.stdout.strip().splitlines()[-1])
    except (ValidationError, IndexError) as exc:
        raise _Refused(
            Verdict.INFRA, "the proof's output cannot be read", "Run the cell again; see its output.log."
        ) from exc


def _pins(lock: str) -> dict[str, str]:
    return {name.lower().replace("_", "-"): version for name, version in _PIN.findall(lock)}


def _remembered(folder: Path) -> _State | None:
    """What is known of the environment, or None where there is none that was ever proved."""
    try:
        return _State.model_validate_json((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def _remember(folder: Path, state: _State) -> None:
    write_atomically(folder / "state.json", json.dumps(state.model_dump(mode="json")))


def _forget(folder: Path) -> None:
    (folder / "state.json").unlink(missing_ok=True)
