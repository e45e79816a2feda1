"""Stands between the harness and one child: bounds what it may use, and leaves none of its descendants behind.

Run as a file with ``-I -S``; standard library only. Linux only: it is the reaper of all its descendants
(``PR_SET_CHILD_SUBREAPER``), so a daemon that left its session still belongs to it. The harness holds the other end of
a socket: when the harness dies, however it dies, the socket closes and everything below is killed. Should the
supervisor itself be killed, the kernel kills the child (``PR_SET_PDEATHSIG``).

The job is one JSON line on the socket, the outcome another; the child never sees the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_CENSUS_S = 0.25
_GRACE_S = 3.0
_KILL_S = 20.0
_NAMED = 10
_CHUNK = 1 << 16
_TAIL_BYTES = 1 << 18


def main(descriptor: int) -> None:
    """Run the job that comes through the socket, and answer with how it ended."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    job = json.loads(_line(channel))
    if _closed(channel):
        return  # the harness died while this process started; another one may be doing the job again
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError("this kernel has no subreapers")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever wants this to end closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outcome = _Watch(job, channel).outcome()
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(outcome).encode() + b"\n")


def _line(channel: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = channel.recv(_CHUNK)
        if not piece:
            os._exit(0)  # the harness has died before it said what to do
        data += piece
    return data


def _closed(channel: socket.socket) -> bool:
    """Whether the harness is gone."""
    return bool(select.select([channel], [], [], 0)[0]) and not channel.recv(1, socket.MSG_PEEK)


class _Watch:
    """One child from start to end."""

    def __init__(self, job: dict[str, Any], channel: socket.socket) -> None:
        self._job = job
        self._channel = channel
        self._excess = ""
        self._orphaned = False
        self._status: int | None = None
        self._log = _Log(job["log"], job["log_bytes"])
        output, self._write_end = os.pipe2(os.O_CLOEXEC)
        self._output: int | None = output
        os.set_blocking(output, False)
        self._child = self._start()
        os.close(self._write_end)

    def outcome(self) -> dict[str, Any]:
        """Wait for the child, or for the order to stop; then end every descendant."""
        left: list[str] = []
        try:
            ended_alone = self._wait()
            if not ended_alone:
                self._end_politely()
            elif self._still_there(1.0):
                left = [name for pid in _descendants() if (name := _name_of(pid))]
        finally:
            survivors = self._kill_all()
            self._drain()
            self._log.close()
        return {"status": self._status, "left": left[:_NAMED], "excess": self._excess, "survivors": survivors}

    def _start(self) -> int:
        parent = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(127)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._write_end, 1)
            os.dup2(self._write_end, 2)
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_FSIZE, self._job["file_bytes"])
            os.chdir(self._job["cwd"])
            os.execvpe(self._job["command"][0], self._job["command"], self._job["env"])  # noqa: S606
        except BaseException as exc:  # noqa: BLE001  the copy of this process must end here in every case
            os.write(2, f"cannot be started: {exc}\n".encode("utf-8", "replace"))
        finally:
            os._exit(127)

    def _wait(self) -> bool:
        """Whether the child ended by itself; else the harness is gone, wants an end, or a limit was passed."""
        counted = time.monotonic()
        while True:
            watched = [self._channel.fileno(), *([self._output] if self._output is not None else [])]
            ready, _, _ = select.select(watched, [], [], _POLL_S)
            self._drain()
            self._reap()
            if self._status is not None:
                return True
            if self._channel.fileno() in ready:
                self._orphaned = not self._channel.recv(1)
                return False
            if time.monotonic() - counted > _CENSUS_S:
                counted = time.monotonic()
                processes = len(_descendants())
                if processes > self._job["processes"]:
                    self._excess = f"it had {processes} processes, the limit is {self._job['processes']}"
                    return False

    def _end_politely(self) -> None:
        """Let the child end by itself; a fork bomb and an orphan of a dead harness get no such time."""
        if self._excess or self._orphaned:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child, signal.SIGTERM)
        until = time.monotonic() + _GRACE_S
        while self._status is None and time.monotonic() < until:
            time.sleep(_POLL_S)
            self._drain()
            self._reap()

    def _still_there(self, seconds: float) -> bool:
        """Whether a descendant outlives the child by this time."""
        until = time.monotonic() + seconds
        while True:
            self._drain()
            self._reap()
            if not _descendants():
                return False
            if time.monotonic() > until:
                return True
            time.sleep(_POLL_S)

    def _kill_all(self) -> int:
        """Kill every descendant, until there is none; returns how many could not be killed."""
        until = time.monotonic() + _KILL_S
        while alive := _descendants():
            # Stopped first: what is stopped cannot fork while the others are killed.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            self._drain()
            self._reap()
            if time.monotonic() > until:
                return len(_descendants())
            time.sleep(0.005)
        self._reap()
        return 0

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._child:
                    self._status = os.waitstatus_to_exitcode(status)

    def _drain(self) -> None:
        """Take what the child has written, a bounded piece at a time."""
        for _ in range(64):
            if self._output is None:
                return
            try:
                data = os.read(self._output, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                os.close(self._output)
                self._output = None
                return
            self._log.add(data)


class _Log:
    """The child's output on disk: its beginning, and its end when it is longer than the limit."""

    def __init__(self, path: str, limit: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._room = limit
        self._tail: deque[bytes] = deque()
        self._held = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        head, rest = data[: self._room], data[self._room :]
        self._room -= len(head)
        self._write(head)
        if rest:
            self._tail.append(rest)
            self._held += len(rest)
        while self._held > _TAIL_BYTES:
            self._held -= len(self._tail[0])
            self._dropped += len(self._tail.popleft())

    def close(self) -> None:
        if self._dropped:
            self._write(f"\n… {self._dropped} bytes of output were left out …\n".encode())
        self._write(b"".join(self._tail))
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the child's processes alive
            while data:
                data = data[os.write(self._file, data) :]


def _descendants() -> list[int]:
    """Every living process below this one; zombies are not living."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in os.listdir("/proc"):  # noqa: PTH208  four times a second
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stream:  # noqa: PTH123
                state, parent = stream.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        children.setdefault(int(parent), []).append(int(entry))
        if state in {b"Z", b"X"}:
            dead.add(int(entry))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found += [pid for pid in below if pid not in dead]
    return found


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:  # noqa: PTH123
            return stream.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip() or f"process {pid}"
    except OSError:
        return ""


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]))
