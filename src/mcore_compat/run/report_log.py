"""Reads the suite's report log: what ran in a cell, and how it ended. Pure.

The log is written line by line while the suite runs, so a crash leaves all that was known. A log without its last
record is incomplete, and an incomplete log proves nothing that it does not contain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_compat.matrix.inventory import check_of
from mcore_compat.records import CheckOutcome, SuiteLog

__all__ = ["parse"]

_MESSAGE_LINES = 24


@dataclass
class _Case:
    passed: bool = False
    failed: bool = False
    skipped: bool = False
    seconds: float = 0.0
    message: str = ""


def parse(lines: Iterable[str]) -> SuiteLog:
    """The log in ``lines``, up to the first line that cannot be read."""
    cases: dict[str, _Case] = {}
    errors: dict[str, str] = {}
    exit_status: int | None = None
    broken: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if not isinstance(entry, dict):
            broken = number
            break
        kind = entry.get("$report_type")
        if kind == "SessionFinish":
            exit_status = int(entry["exitstatus"])
        elif kind == "CollectReport":
            if entry.get("outcome") == "failed":
                errors[str(entry.get("nodeid") or "the suite")] = _message(entry.get("longrepr"))
        elif "when" in entry and "nodeid" in entry:
            _add(cases.setdefault(str(entry["nodeid"]), _Case()), entry)
    return SuiteLog(_by_check(cases), errors, exit_status, broken)


def _add(case: _Case, entry: Mapping[str, Any]) -> None:
    outcome = entry.get("outcome")
    case.seconds += float(entry.get("duration") or 0.0)
    if outcome == "failed":
        if not case.failed:
            case.message = _message(entry.get("longrepr"))
        case.failed = True
    elif outcome == "skipped":
        case.skipped = True
        case.message = case.message or str(entry.get("wasxfail") or _message(entry.get("longrepr")))
    elif outcome == "passed" and entry.get("when") == "call":
        case.passed = True


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
        )
    return checks


def _message(longrepr: Any) -> str:
    """The lines that say what went wrong, without the traceback's code."""
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
