"""Makes a cell's environment, or finds it made, and proves that it is the one asked for.

One folder a cell: ``<cells>/<id>/`` with ``venv``, ``home``, ``lock.txt`` and ``state.json``. uv links files from its
cache, so a further environment costs neither time nor disk as long as both lie on one filesystem; files inside are
therefore never edited in place.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.errors import InfrastructureError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.source import local_path
from mcore_compat.provision import probe
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.provision.process import run_logged
from mcore_compat.provision.recipe import Recipe, recipe_of
from mcore_compat.provision.uv import Uv, UvFailure
from mcore_compat.provision.verify import differences, problems
from mcore_compat.records import Environment, EnvironmentFacts, Package, ProjectWheel, Provisioned
from mcore_compat.verdicts import Verdict

__all__ = ["is_unchanged", "provision"]

# Generous: on a host that is busy with other work an import of torch and megatron has taken five minutes.
_PROBE_LIMIT_S = 900
_SHOWN = 5
HARNESS = "mcore-compat"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", re.MULTILINE)


class _State(BaseModel):
    """What is remembered of an environment between runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: str
    subject_sha256: str
    package_sha256: str = ""
    lock_sha256: str
    facts: EnvironmentFacts


@dataclass(frozen=True)
class _Installed:
    """What goes into a cell beside what is resolved.

    Attributes:
        harness: the wheel of this project, with the plugin.
        package: that of the project under test, if it is another one.
    """

    harness: ProjectWheel
    package: Package | None = None

    @property
    def package_digest(self) -> str:
        """Of the package's content and of how it is installed; empty: there is none."""
        if self.package is None:
            return ""
        return self.package.wheel.sha256 + ("" if self.package.source is None else ":editable")

    @property
    def requirements(self) -> tuple[str, ...]:
        """Resolved with the cell's own, and not installed then."""
        return () if self.package is None else (self.package.requirement,)

    @property
    def resolving(self) -> tuple[str | Path, ...]:
        """Options of the resolution: where its dependencies are, and what is left out of the lock."""
        if self.package is None:
            return ()
        links = [*self.package.links, self.harness.wheel.parent]
        found = (part for folder in links for part in ("--find-links", folder))
        return (*found, "--no-emit-package", self.package.wheel.name, "--no-emit-package", HARNESS)


@dataclass
class _Refused(Exception):  # noqa: N818  carries a verdict to this module's one boundary
    verdict: Verdict
    reason: str
    next_step: str
    output: str = ""


def provision(
    cell: Cell,
    common: tuple[str, ...],
    subject: ProjectWheel,
    cells: Path,
    uv: Uv,
    interpreter: Path,
    host: Mapping[str, str],
    package: Package | None = None,
) -> Provisioned:
    """Make or reuse the environment of ``cell`` below ``cells``. The caller holds the cell's lock.

    ``subject`` is the wheel of this project, whose plugin goes into every cell; ``package`` that of the project that
    is judged, where it is another one.

    Requirements that cannot be resolved or built give ``unresolvable``; a proof that fails, a network or a disk that
    is missing give ``infra``. Neither raises, so that the other cells go on.
    """
    started = time.monotonic()
    try:
        environment = _made(cell, common, _Installed(subject, package), cells / cell.id, uv, interpreter, host)
    except _Refused as exc:
        return Provisioned(time.monotonic() - started, None, exc.verdict, exc.reason, exc.next_step, exc.output)
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
    own: _Installed,
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
    recipe = recipe_of(cell, common, own.package)
    state = _remembered(folder)
    reusable = cell.source is None or recipe.source_digest is not None
    remade = ""
    if state is not None and state.identity == recipe.identity and reusable:
        found = _reused(cell, own, folder, state, uv, host)
        if isinstance(found, Environment):
            return found
        remade = found
    _create(recipe, folder, uv, interpreter, own)
    _install_subject(folder, own.harness, uv)
    if own.package is not None:
        _install_package(folder, own.package, uv)
    lock = (folder / "lock.txt").read_text(encoding="utf-8")
    facts = _probed(cell, folder, host, deep=True)
    wrong = problems(cell, facts, _pins(lock), own.harness.version, own.package)
    if wrong:
        raise _Refused(
            Verdict.INFRA,
            "the environment is not the one asked for: " + "; ".join(wrong),
            f"Remove {folder.parent.name}/{folder.name} and run again; if it comes back, correct the cell's recipe.",
        )
    _remember(folder, recipe.identity, own, lock, facts)
    return Environment(folder, facts, lock, reused=False, remade=remade)


def _reused(
    cell: Cell, own: _Installed, folder: Path, state: _State, uv: Uv, host: Mapping[str, str]
) -> Environment | str:
    """The environment that is there, with today's wheels in it; or why it has to be made again.

    Every file is compared with what was remembered after the full verification; only the import is not repeated.
    """
    changing = []
    try:
        # Forgotten first: an install that is interrupted leaves nothing that a later run would believe.
        if state.subject_sha256 != own.harness.sha256:
            changing.append(HARNESS)
            _forget(folder)
            _install_subject(folder, own.harness, uv)
        if own.package is not None and state.package_sha256 != own.package_digest:
            changing.append(own.package.wheel.name)
            _forget(folder)
            _install_package(folder, own.package, uv)
        lock = (folder / "lock.txt").read_text(encoding="utf-8")
        facts = _probed(cell, folder, host, deep=False).model_copy(update={"imported": state.facts.imported})
    except OSError as exc:
        return f"{Path(exc.filename or folder).name} cannot be read"
    except _Refused as exc:
        return exc.reason
    wrong = [*problems(cell, facts, _pins(lock), own.harness.version, own.package)]
    wrong += differences(state.facts, facts, but=changing)
    if _digest(lock) != state.lock_sha256:
        wrong.append("lock.txt was changed")
    if wrong:
        return "; ".join(wrong[:_SHOWN])
    _remember(folder, state.identity, own, lock, facts)
    return Environment(folder, facts, lock, reused=True)


def is_unchanged(cell: Cell, environment: Environment, host: Mapping[str, str]) -> bool:
    """Whether an environment is still the one that was verified; every file is compared again."""
    try:
        facts = _probed(cell, environment.folder, host, deep=False)
    except (OSError, _Refused):
        return False
    return not facts.changed_count and not differences(environment.facts, facts)


def _create(recipe: Recipe, folder: Path, uv: Uv, interpreter: Path, own: _Installed) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "home").mkdir(parents=True)
    requirements = (*recipe.requirements, *own.requirements)
    (folder / "requirements.in").write_text("\n".join(requirements) + "\n", encoding="utf-8")
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
                *own.resolving,
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
            exc.output,
        )
    if "no usable wheels" in exc.reason or "Failed to build" in exc.reason:
        step = "A build from source needs the cell's allow_sdist with a reason, and a C++ compiler on this host."
    else:
        step = "Change the cell's requirements or constraints."
    return _Refused(Verdict.UNRESOLVABLE, exc.reason, step, exc.output)


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
            Verdict.INFRA,
            f"the subject's wheel does not install: {exc.reason}",
            "Build it by hand with `uv build`.",
            exc.output,
        ) from exc


def _install_package(folder: Path, package: Package, uv: Uv) -> None:
    """The project's own package by itself: its dependencies are there already, resolved with the others."""
    python = folder / "venv" / "bin" / "python"
    alone = ("pip", "install", "-q", "--no-deps", "--reinstall", "-p", python)
    try:
        if package.source is None:
            uv.call([*alone, "--offline", package.wheel.wheel])
        else:
            # Its backend writes into the source folder, which several cells share.
            with FileLock(package.wheel.wheel.with_suffix(".lock")):
                uv.call([*alone, "-e", package.source])
    except UvFailure as exc:
        raise _Refused(
            Verdict.INFRA,
            f"the package {package.wheel.name} does not install: {exc.reason}",
            "Install it by hand with `uv pip install`.",
            exc.output,
        ) from exc


def _probed(cell: Cell, folder: Path, host: Mapping[str, str], *, deep: bool) -> EnvironmentFacts:
    """The probe's facts, from a process with a clean environment in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="mcore-compat-probe-") as scratch:
        empty = Path(scratch, "empty")
        empty.mkdir()
        done = run_logged(
            [folder / "venv" / "bin" / "python", "-I", "-B", probe.__file__, *(["--import"] if deep else [])],
            cwd=empty,
            env=cell_environment(host, cell, home=folder / "home", temporary=empty),
            log=Path(scratch, "output.log"),
            limit_s=_PROBE_LIMIT_S,
            cancel=threading.Event(),
        )
    if done.timed_out:
        raise _Refused(
            Verdict.INFRA, f"the proof did not end within {_PROBE_LIMIT_S} s", "Look at the load of the host."
        )
    lines = [line for line in done.output.splitlines() if line.strip()]
    if done.returncode != 0:
        what = f"`import {probe.DEEP_MODULE}`" if deep else "the interpreter"
        raise _Refused(
            Verdict.INFRA,
            f"{what} fails in the environment: {lines[-1] if lines else 'no output'}",
            "Give the cell the requirement or the variable that this release needs.",
        )
    try:
        return EnvironmentFacts.model_validate_json(next(line for line in reversed(lines) if line.startswith("{")))
    except (ValidationError, StopIteration) as exc:
        raise _Refused(
            Verdict.INFRA, "the proof's output cannot be read", "Run the cell again; see its output.log."
        ) from exc


def _pins(lock: str) -> dict[str, str]:
    return {name.lower().replace("_", "-"): version for name, version in _PIN.findall(lock)}


def _remembered(folder: Path) -> _State | None:
    """What is known of the environment, or None if it was never verified."""
    try:
        return _State.model_validate_json((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def _remember(folder: Path, identity: str, own: _Installed, lock: str, facts: EnvironmentFacts) -> None:
    state = _State(
        identity=identity,
        subject_sha256=own.harness.sha256,
        package_sha256=own.package_digest,
        lock_sha256=_digest(lock),
        facts=facts,
    )
    write_atomically(folder / "state.json", json.dumps(state.model_dump(mode="json")))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _forget(folder: Path) -> None:
    (folder / "state.json").unlink(missing_ok=True)
