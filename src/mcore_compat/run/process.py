"""Runs a child in its own session, with a time limit, and leaves none of its processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mcore_compat.records import Finished

__all__ = ["run_logged"]

_POLL_S = 0.1
_GRACE_S = 3.0


def run_logged(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    limit_s: float,
    cancel: threading.Event,
    on_tick: Callable[[], None] | None = None,
) -> Finished:
    """Run ``command`` in a new session with its output in ``log``.

    When it ends, by itself or not, whatever is left of its process group is killed: a suite that forks and hangs
    must not outlive its cell.
    """
    started = time.monotonic()
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = cancelled = False
        try:
            while child.poll() is None:
                timed_out = time.monotonic() - started > limit_s
                cancelled = cancel.is_set()
                if timed_out or cancelled:
                    break
                if on_tick is not None:
                    on_tick()
                time.sleep(_POLL_S)
        finally:
            _end_group(child)
    return Finished(
        returncode=child.returncode,
        timed_out=timed_out,
        cancelled=cancelled,
        seconds=time.monotonic() - started,
        output=log.read_text(encoding="utf-8", errors="replace"),
    )


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's group: politely while the child itself is alive, then for good."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
