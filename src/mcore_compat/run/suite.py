"""Runs the property suite inside one cell, in its own processes, and gathers what it left. No verdict is made here."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.files.untrusted import open_regular, printable, read_bounded
from mcore_compat.matrix.cells import Cell
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.provision.process import run_logged
from mcore_compat.provision.verify import PYTEST_PLUGINS
from mcore_compat.records import Environment, Package, SuiteLog, SuiteRun
from mcore_compat.run.bytecode import open_bytecode, seal_bytecode
from mcore_compat.run.report_log import parse
from mcore_compat.run.suite_facts import read_facts, read_origins
from mcore_compat.run.variables import OUT, PACKAGE, PACKAGE_SOURCE
from mcore_compat.subjects.protocol import VARIABLE
from mcore_compat.subjects.selection import OURS, ChosenSubject

__all__ = ["LOG_LIMIT", "SuiteOptions", "run_suite"]

_TEST_LIMIT_S = 300
LOG_LIMIT = 256 << 20
_PROGRESS_BYTES = 4 << 20
_KEPT = ("output.log", "reportlog.jsonl", "facts*.json", "origins-*.json")
_KEPT_FILES = 256
_CALL = b'"when": "call"'


@dataclass(frozen=True)
class SuiteOptions:
    """How the suite is run.

    Attributes:
        suite: its folder.
        profile: the Hypothesis profile.
        workers: pytest-xdist workers inside a cell; 0: none.
        collect_only: say what would run, and run nothing.
        only: run this check alone (``file.py::test``); the judge then finds the others missing.
        subject: what the suite judges.
        package: the project's own package, which the plugin watches.
    """

    suite: Path
    profile: str
    workers: int = 0
    collect_only: bool = False
    only: str | None = None
    subject: ChosenSubject = OURS
    package: Package | None = None


def run_suite(
    cell: Cell,
    environment: Environment,
    options: SuiteOptions,
    out: Path,
    host: Mapping[str, str],
    cancel: threading.Event,
    on_progress: Callable[[int], None] | None = None,
) -> SuiteRun:
    """Run the suite in ``cell`` with its results in ``out``.

    Args:
        cell: the cell.
        environment: its proved environment.
        options: which suite, and how.
        out: the folder for the results; whatever an earlier attempt left there is removed. The suite itself writes to
            a folder of this attempt alone, so that a process of an earlier attempt cannot write into this one.
        host: the caller's environment; only an allow-list of it is passed on.
        cancel: set to kill the suite.
        on_progress: called with the number of cases that have run so far.
    """
    nonce = secrets.token_hex(8)
    if out.exists():
        # Moved away first: a process of a killed run may still be writing there.
        stale = out.rename(out.with_name(f".{out.name}-{nonce}"))
        shutil.rmtree(stale, ignore_errors=True)
    attempt = out / f"attempt-{nonce}"
    attempt.mkdir(parents=True)
    log = attempt / "reportlog.jsonl"
    counter = _Counter(log, on_progress)
    with tempfile.TemporaryDirectory(prefix="mcore-compat-cell-") as scratch:
        # Started in an empty folder: inside a checkout of Megatron Python would import the checkout.
        work, temporary = Path(scratch, "work"), Path(scratch, "tmp")
        work.mkdir()
        temporary.mkdir()
        settings = options.suite.resolve() / "pytest.ini"
        if not settings.is_file():
            # Without settings of its own a suite gets none: those of a folder above are not meant for it.
            settings = Path(scratch, "pytest.ini")
            settings.write_text("[pytest]\n", encoding="utf-8")
        extra = {
            OUT: str(attempt),
            "MCORE_COMPAT_ATTEMPT": nonce,
            # Plugins are loaded by name: any package of the environment may ask pytest to load its own.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "MCORE_COMPAT_CELL_ID": cell.id,
            **({VARIABLE: options.subject.variable} if options.subject.is_fused else {}),
            **_watched(options.package),
            "HYPOTHESIS_PROFILE": options.profile,
            # Examples that failed once are kept with the cell and tried first by profiles that use a database.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(environment.home / "hypothesis"),
        }
        open_bytecode(environment.folder, environment.home)
        env = cell_environment(host, cell, home=environment.home, temporary=temporary, extra=extra)
        finished = run_logged(
            _command(environment.python, options, settings, log),
            cwd=work,
            env=env,
            log=attempt / "output.log",
            limit_s=cell.time_limit_s,
            cancel=cancel,
            on_tick=counter.update,
        )
    seal_bytecode(environment.folder, environment.home)
    facts, problem = read_facts(attempt)
    run = SuiteRun(finished, _read_log(log), facts, problem, read_origins(attempt.glob("origins-*.json"), nonce))
    _keep(attempt, out)
    return run


def _watched(package: Package | None) -> dict[str, str]:
    if package is None:
        return {}
    source = {} if package.source is None else {PACKAGE_SOURCE: str(package.source)}
    return {PACKAGE: os.pathsep.join(package.modules), **source}


def _keep(attempt: Path, out: Path) -> None:
    """Keep what the harness knows of an attempt's files, and nothing else that was written there."""
    for pattern in _KEPT:
        for path in sorted(attempt.glob(pattern))[:_KEPT_FILES]:
            path.rename(out / path.name)
    shutil.rmtree(attempt, ignore_errors=True)


def _read_log(path: Path) -> SuiteLog:
    try:
        return parse(read_bounded(path, LOG_LIMIT).split("\n"))
    except FileNotFoundError:
        return SuiteLog()
    except OSError as exc:
        return SuiteLog(problem=printable(str(exc)))


def _command(python: Path, options: SuiteOptions, settings: Path, log: Path) -> list[str | Path]:
    suite = options.suite.resolve()
    return [
        python,
        "-m",
        "pytest",
        f"{suite}/{options.only}" if options.only else suite,
        f"--rootdir={suite}",
        "-c",
        settings,
        "-p",
        "no:cacheprovider",
        *(part for plugin in PYTEST_PLUGINS for part in ("-p", plugin)),
        "-p",
        "mcore_compat.run.pytest_plugin",
        "-q",
        # One file that cannot be imported must not hide what the others say.
        "--continue-on-collection-errors",
        f"--report-log={log}",
        f"--timeout={_TEST_LIMIT_S}",
        *(["-n", str(options.workers)] if options.workers else []),
        *(["--collect-only"] if options.collect_only else []),
    ]


class _Counter:
    """Counts the cases in a growing report log, reading only what is new."""

    def __init__(self, log: Path, on_progress: Callable[[int], None] | None) -> None:
        self._log = log
        self._on_progress = on_progress
        self._offset = 0
        self._count = 0

    def update(self) -> None:
        if self._on_progress is None:
            return
        try:
            source = os.fdopen(open_regular(self._log), "rb")
        except OSError:
            return
        with source:
            source.seek(self._offset)
            new = source.read(_PROGRESS_BYTES)
        end = new.rfind(b"\n") + 1
        if end:
            self._offset += end
            self._count += new[:end].count(_CALL)
            self._on_progress(self._count)
