"""Reads the suite's report log: what ran in a cell, and how it ended. Pure.

The log is written line by line while the suite runs, so a crash leaves all that was known. A log without its last
record is incomplete, and an incomplete log proves nothing that it does not contain. A cell can write anything there:
a line of another shape than pytest's ends the log, and texts are made printable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_compat.files.untrusted import MESSAGE_LIMIT, parsed_json, printable
from mcore_compat.matrix.inventory import check_of
from mcore_compat.records import CheckOutcome, SuiteLog

__all__ = ["parse"]

_MESSAGE_LINES = 24
_LINE_LIMIT = 8 << 20
_NODE_LIMIT = 2000
_CASE_LIMIT = 200_000
_OUTCOMES = frozenset({"passed", "failed", "skipped"})


@dataclass
class _Case:
    passed: bool = False
    failed: bool = False
    skipped: bool = False
    seconds: float = 0.0
    message: str = ""


def parse(lines: Iterable[str]) -> SuiteLog:
    """The log in ``lines``, up to the first line that cannot be read."""
    reading = _Reading()
    broken: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            reading.add(line)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
            broken = number
            break
    return SuiteLog(_by_check(reading.cases), reading.errors, reading.exit_status, broken)


@dataclass
class _Reading:
    """What the lines so far say; a line of an unknown shape raises an error of Python's own."""

    cases: dict[str, _Case] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    exit_status: int | None = None

    def add(self, line: str) -> None:
        if len(line) > _LINE_LIMIT or len(self.cases) + len(self.errors) > _CASE_LIMIT:
            raise ValueError("too much of it")
        entry = parsed_json(line)
        kind = entry.get("$report_type")
        if kind == "SessionFinish":
            self.exit_status = _whole(entry["exitstatus"])
        elif kind == "CollectReport":
            if entry.get("outcome") == "failed":
                self.errors[_node(entry.get("nodeid") or "the suite")] = _message(entry.get("longrepr"))
        elif "when" in entry and "nodeid" in entry:
            _add(self.cases.setdefault(_node(entry["nodeid"]), _Case()), entry)


def _add(case: _Case, entry: Mapping[str, Any]) -> None:
    outcome = entry["outcome"]
    if outcome not in _OUTCOMES:
        raise ValueError("an outcome that pytest does not have")
    case.seconds += _seconds(entry.get("duration"))
    if outcome == "failed":
        if not case.failed:
            case.message = _message(entry.get("longrepr"))
        case.failed = True
    elif outcome == "skipped":
        case.skipped = True
        case.message = case.message or _text(entry.get("wasxfail") or "") or _message(entry.get("longrepr"))
    elif entry.get("when") == "call":
        case.passed = True


def _node(value: Any) -> str:
    return printable(_string(value), _NODE_LIMIT)


def _text(value: Any) -> str:
    return printable(_string(value), MESSAGE_LIMIT)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a whole number")
    return value


def _seconds(value: Any) -> float:
    seconds = float(value or 0.0)
    if isinstance(value, str) or not math.isfinite(seconds) or seconds < 0:
        raise ValueError("not a duration")
    return seconds


def _by_check(cases: Mapping[str, _Case]) -> dict[str, CheckOutcome]:
    checks: dict[str, CheckOutcome] = {}
    for node, case in cases.items():
        check = check_of(node)
        so_far = checks.get(check, CheckOutcome())
        failed, skipped = case.failed, case.skipped and not case.failed
        passed = case.passed and not failed and not skipped
        message = so_far.message
        if failed and not so_far.failed:
            message = case.message
        checks[check] = replace(
            so_far,
            passed=so_far.passed + passed,
            failed=so_far.failed + failed,
            # A case of which only the setup was logged ran nothing: it counts with the skipped.
            skipped=so_far.skipped + (not failed and not passed),
            seconds=so_far.seconds + case.seconds,
            message=message or case.message,
            failures=(*so_far.failures, case.message) if failed else so_far.failures,
        )
    return checks


def _message(longrepr: Any) -> str:
    """The lines that say what went wrong, without the traceback's code; printable."""
    return printable(_said(longrepr), MESSAGE_LIMIT)


def _said(longrepr: Any) -> str:
    if isinstance(longrepr, str):
        lines = [line for line in longrepr.splitlines() if line.strip()]
        marked = [line[1:].strip() for line in lines if line.startswith("E ")]
        return _limited(marked or lines[-3:])
    if isinstance(longrepr, list | tuple):
        return str(longrepr[-1]) if longrepr else ""
    if not isinstance(longrepr, dict):
        return ""
    entries = (longrepr.get("reprtraceback") or {}).get("reprentries") or []
    for entry in reversed(entries):
        lines = (entry.get("data") or {}).get("lines") or []
        marked = [line[1:].rstrip() for line in lines if line.startswith("E ") or line == "E"]
        if marked:
            return _limited(_bare(marked, lines, entry) or _dedented(marked))
    crash = longrepr.get("reprcrash") or {}
    return _limited(str(crash.get("message", "")).splitlines())


def _bare(marked: list[str], lines: list[str], entry: Mapping[str, Any]) -> list[str]:
    """What an error without words says by its place: the line of code, as in another project's bare ``assert``."""
    code = [line[1:].strip() for line in lines if line.startswith(">")]
    if len(marked) != 1 or not marked[0].strip().isidentifier() or not code:
        return []
    place = (entry.get("data") or {}).get("reprfileloc") or {}
    return [f"{marked[0].strip()}: {code[-1]}", f"in {place.get('path', '?')}:{place.get('lineno', '?')}"]


def _dedented(lines: list[str]) -> list[str]:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


def _limited(lines: list[str]) -> str:
    if len(lines) <= _MESSAGE_LINES:
        return "\n".join(lines)
    return "\n".join([*lines[:_MESSAGE_LINES], f"… {len(lines) - _MESSAGE_LINES} more lines"])
