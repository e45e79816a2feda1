"""Runs a child under a supervisor, with limits, and leaves none of its processes behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_compat.files.untrusted import printable, read_bounded
from mcore_compat.provision import supervisor
from mcore_compat.records import Finished

__all__ = ["Limits", "run_logged"]

_POLL_S = 0.1
# The supervisor gives a child three seconds and kills for twenty; then something is wrong with the supervisor itself.
_SUPERVISOR_S = 30.0
_MARK = "MCORE_COMPAT_RUN"
_KILLED = -int(signal.SIGKILL)


@dataclass(frozen=True)
class Limits:
    """What a child may use besides time.

    Attributes:
        log_bytes: of its output that are kept; what is beyond is counted, but for the end.
        file_bytes: of one file that it writes.
        processes: that it and its descendants may be at once.
    """

    log_bytes: int = 16 << 20
    file_bytes: int = 4 << 30
    processes: int = 1024


DEFAULT_LIMITS = Limits()


def run_logged(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    limit_s: float,
    cancel: threading.Event,
    on_tick: Callable[[], None] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Finished:
    """Run ``command`` in a session of its own with its output in ``log``.

    When it ends, by itself or not, all its descendants are killed, daemons that left its session too; so they are when
    this process dies, in whatever way.
    """
    started, mark = time.monotonic(), secrets.token_hex(8)
    job = {
        "command": [str(part) for part in command],
        "cwd": str(cwd),
        "env": {**env, _MARK: mark},
        "log": str(log),
        "log_bytes": limits.log_bytes,
        "file_bytes": limits.file_bytes,
        "processes": limits.processes,
    }
    log.unlink(missing_ok=True)
    ours, theirs = socket.socketpair()
    timed_out = cancelled = False
    with ours:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        try:
            ours.sendall(json.dumps(job).encode() + b"\n")
            while child.poll() is None:
                timed_out = time.monotonic() - started > limit_s
                cancelled = cancel.is_set()
                if timed_out or cancelled:
                    break
                if on_tick is not None:
                    on_tick()
                time.sleep(_POLL_S)
        finally:
            outcome = _ended(child, ours)
            if not outcome or outcome["survivors"]:
                _kill_marked(mark)
    return Finished(
        returncode=_KILLED if (status := outcome.get("status")) is None else status,
        timed_out=timed_out,
        cancelled=cancelled,
        seconds=time.monotonic() - started,
        output=_output(log, limits),
        left_behind=tuple(printable(name, 200) for name in outcome.get("left", ())),
        excess=outcome.get("excess", ""),
    )


def _ended(child: subprocess.Popen[bytes], ours: socket.socket) -> dict[str, Any]:
    """Have the supervisor end everything, and return what it says; empty when it says nothing."""
    data = b""
    with contextlib.suppress(OSError):
        if child.poll() is None:
            ours.sendall(b"\n")
        ours.settimeout(_SUPERVISOR_S)
        while not data.endswith(b"\n") and (piece := ours.recv(1 << 16)):
            data += piece
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0 if data else 0.0)
    child.kill()
    child.wait()
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        return {}


def _kill_marked(mark: str) -> None:
    """Kill what still carries the mark; needed only when somebody has killed the supervisor."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def _output(log: Path, limits: Limits) -> str:
    try:
        return printable(read_bounded(log, 2 * limits.log_bytes + (1 << 20)))
    except OSError as exc:
        return printable(f"the output cannot be read: {exc}")
