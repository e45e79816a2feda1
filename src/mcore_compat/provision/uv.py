"""Calls uv, and says in one line why it refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_compat import versions
from mcore_compat.errors import InfrastructureError, MissingToolError
from mcore_compat.files.untrusted import printable
from mcore_compat.provision.child_env import installer_environment
from mcore_compat.provision.process import Limits, run_logged

__all__ = ["Uv", "UvFailure", "shortened"]

_LIMIT_S = 1800
# Commands that install or build, and whose output nobody reads but a person.
_SUPERVISED = frozenset({"build", "pip", "tool", "venv"})
_ASK_THE_INDEX = frozenset({"build", "pip"})
_LIMITS = Limits(file_bytes=32 << 30, processes=4096)
_WORDS = 300
# uv's own words when the host, not the requirement, is at fault.
_HOST_AT_FAULT = re.compile(
    r"(error sending request|dns error|failed to fetch|network connectivity is disabled|not found in the cache|"
    r"connection (refused|reset)|"
    r"timed out|no space left on device|permission denied|request failed|failed to download|tls handshake)",
    re.IGNORECASE,
)
_CAUSE = re.compile(r"^\s*(?:error|cause|Caused by|\u00d7|\u251c\u2500\u25b6|\u2570\u2500\u25b6)\s*:?\s*(.+)$")
_CONCLUSION = "we can conclude that"
_BUILD_ERROR = re.compile(r"^\s*((?:\w+\.)*\w*(?:Error|error)\b.*)$")


class UvFailure(Exception):  # noqa: N818  a result that the caller turns into a verdict, not the end of the run
    """uv could not do what was asked.

    Attributes:
        reason: its own words, shortened to one line, and the last words of a build backend.
        host_at_fault: the network or the disk, not the requirements.
        output: everything that it said.
    """

    def __init__(self, output: str) -> None:
        output = printable(output)
        words = _backend_words(output)
        self.reason = shortened(output)
        if words and words not in self.reason:
            self.reason += f"; the build said: {words}"
        self.output = output
        self.host_at_fault = bool(_HOST_AT_FAULT.search(output))
        super().__init__(self.reason)


@dataclass(frozen=True)
class Uv:
    """A uv executable and the environment it is called with.

    Attributes:
        executable: the file.
        env: the environment variables.
        wheels: a folder that all packages come from, in place of an index; None: the index is asked.
    """

    executable: Path
    env: Mapping[str, str]
    wheels: Path | None = None

    @classmethod
    def find(cls, host: Mapping[str, str], wheels: Path | None = None) -> Uv:
        """The uv that came with this harness, else the first on the path.

        Args:
            host: the caller's environment variables.
            wheels: a folder that all packages come from, in place of an index.

        Raises:
            MissingToolError: there is none, or it does not run.
        """
        beside = Path(sys.executable).with_name("uv")
        found = str(beside) if beside.is_file() else shutil.which("uv", path=host.get("PATH", os.defpath))
        if found is None:
            raise MissingToolError("uv was not found.", "Install it: `pip install uv`.")
        uv = cls(Path(found), installer_environment(host), wheels)
        try:
            uv.call(["--version"])
        except UvFailure as exc:
            raise MissingToolError(f"uv does not run: {exc.reason}.", "Install it: `pip install uv`.") from exc
        return uv

    def call(self, arguments: Sequence[str | Path], *, cwd: Path | None = None) -> str:
        """Run uv and return its standard output.

        Raises:
            UvFailure: it refused.
            InfrastructureError: it did not end in half an hour, or could not be started.
        """
        command = [str(self.executable), *(str(argument) for argument in arguments)]
        if self.wheels is not None and arguments[0] in _ASK_THE_INDEX:
            command += ["--no-index", "--find-links", str(self.wheels)]
        if arguments[0] in _SUPERVISED:
            return self._supervised(command, cwd or Path.cwd())
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise InfrastructureError(
                f"`uv {arguments[0]}` did not end within {_LIMIT_S} s.", "Look at the network and the disk."
            ) from exc
        except OSError as exc:
            raise MissingToolError(f"uv cannot be started: {exc.strerror}.", "Install it: `pip install uv`.") from exc
        if done.returncode != 0:
            raise UvFailure(done.stderr or done.stdout)
        return done.stdout

    def _supervised(self, command: Sequence[str], cwd: Path) -> str:
        """Run what may call a build backend: none of its processes outlives it, nor this one."""
        with tempfile.TemporaryDirectory(prefix="mcore-compat-uv-") as scratch:
            done = run_logged(
                command,
                cwd=cwd,
                env=self.env,
                log=Path(scratch, "output.log"),
                limit_s=_LIMIT_S,
                cancel=threading.Event(),
                limits=_LIMITS,
            )
        if done.timed_out:
            raise InfrastructureError(
                f"`uv {command[1]}` did not end within {_LIMIT_S} s.", "Look at the network and the disk."
            )
        if done.returncode != 0:
            raise UvFailure(f"error: {done.excess}" if done.excess else done.output)
        return done.output

    def shares_disk_with(self, folder: Path) -> bool:
        """Whether files can be linked from uv's cache into ``folder``; else every environment is a full copy."""
        cache = Path(self.call(["cache", "dir"]).strip())
        return _device(cache) == _device(folder)

    def interpreter(self, version: str) -> Path:
        """The installed interpreter of this minor version.

        Raises:
            MissingToolError: there is none on this host; none is downloaded behind the caller's back.
        """
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            # The one that runs this is known to work; a version manager's shim on the path may not.
            base = Path(sys.base_prefix, "bin", f"python{version}")
            if base.is_file():
                return base
        try:
            found = self.call(["python", "find", "--no-project", "--no-python-downloads", "--system", version])
        except UvFailure as exc:
            managed = self._beside_shims(version)
            if managed is not None:
                return managed
            raise MissingToolError(
                f"No Python {version} interpreter was found on this host ({exc.reason}).",
                f"Install one, for example with `uv python install {version}` or the system's package manager.",
            ) from exc
        return Path(found.strip())

    def _beside_shims(self, version: str) -> Path | None:
        """The newest one that pyenv has installed; uv stops at pyenv's shim when that version is not activated."""
        root = Path(self.env.get("PYENV_ROOT") or Path(self.env.get("HOME", "/nonexistent"), ".pyenv"))
        found = [path for path in root.glob(f"versions/{version}.*/bin/python{version}") if path.is_file()]
        return max(found, key=lambda path: versions.sort_key(path.parts[-3]), default=None)


def _device(path: Path) -> int:
    """The filesystem of a path, or of the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists()).stat().st_dev


def _backend_words(output: str) -> str:
    """The last lines that a build backend wrote before it failed, as one line; empty: no build failed."""
    _, mark, said = output.partition("[stderr]")
    if not mark:
        _, mark, said = output.partition("[stdout]")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    hints = [number for number, line in enumerate(lines) if line.startswith("hint:")]
    kept = lines[: hints[0]] if hints else lines
    return shortened("\n".join(kept[-1:]), _WORDS) if kept else ""


def shortened(output: str, limit: int = 400) -> str:
    """The causes in uv's output, in order, as one line of at most ``limit`` characters."""
    causes: list[str] = []
    for line in _unwrapped(output):
        match = _CAUSE.match(line) or _BUILD_ERROR.match(line)
        if match and match.group(1).strip() not in causes:
            causes.append(match.group(1).strip())
    # Says nothing where a cause follows.
    causes = [cause for cause in causes if not cause.startswith("No solution found")] or causes
    text = "; ".join(cause.rstrip(".") for cause in causes) or " ".join(output.split()) or "no reason given"
    if len(text) <= limit:
        return text
    # A resolver derives its conclusion step by step: the last lines name the conflict.
    return f"…{text[len(text) - limit + 1 :].lstrip()}" if _CONCLUSION in text else f"{text[: limit - 1].rstrip()}…"


def _unwrapped(output: str) -> Iterator[str]:
    """The lines, those of a resolver's derivation joined: it goes on until an empty line or the next cause."""
    joined = ""
    for line in output.splitlines():
        if joined and line.strip() and not _CAUSE.match(line):
            joined += f" {line.strip()}"
            continue
        if joined:
            yield joined
            joined = ""
        match = _CAUSE.match(line)
        if match and match.group(1).startswith("Because "):
            joined = line
        else:
            yield line
    if joined:
        yield joined
