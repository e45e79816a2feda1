"""Workflow commands that GitHub shows as annotations. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_compat.gate.model import GateReport
from mcore_compat.report.answer import counted
from mcore_compat.report.causes import Cause, all_causes
from mcore_compat.report.clean import cleaned, shortened
from mcore_compat.results import Report
from mcore_compat.verdicts import severity

__all__ = ["PER_LEVEL", "render_annotations"]

PER_LEVEL = 10  # GitHub keeps ten errors, ten warnings and ten notices a step, and drops the rest without a word
_MAX_MESSAGE = 900
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _command(level: str, title: str, message: str, file: str | None = None, line: int | None = None) -> str:
    shown = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
    parts = [f"file={_property(file)}"] if file else []
    parts += [f"line={line}"] if line else []
    parts.append(f"title={_property(shortened(title, 120))}")
    return f"::{level} {','.join(parts)}::{_data(shown)}"


def _line(cause: Cause, folder: str) -> tuple[str, str]:
    level = _COMMANDS[severity(cause.weight)]
    file = cause.checks[0].partition("::")[0] if cause.checks else ""
    path = f"{folder}/{file}" if file.endswith(".py") and folder and not cause.in_source else None
    line = None
    if cause.source:
        path, _, number = cause.source.rpartition(":")
        line = int(number)
    rows = [cause.message]
    if cause.where:
        rows[0] = f"{cause.headline} ({cause.where})"
    rows += [f"{mode}: {words}" for mode, words in cause.by_mode]
    if cause.in_source and cause.checks:
        rows.append(f"{counted(len(cause.checks), 'failing check')} name it")
    rows += [f"Cells: {', '.join(cause.cells)}"] if cause.cells else []
    title = cause.kind if cause.in_source else cause.title
    return level, _command(level, title, "\n".join(rows), path, line)


def _all(report: Report | None, gate: GateReport | None) -> Iterator[tuple[str, str]]:
    for cause in all_causes(report, gate):
        if cause.state in {None, "flaky"} or (cause.state == "new" and cause.level != "note"):
            yield _line(cause, report.suite if report else "")


def render_annotations(report: Report | None, gate: GateReport | None = None) -> list[str]:
    """At most ten of a level; a last line counts what was cut."""
    report = cleaned(report) if report else None
    gate = cleaned(gate) if gate else None
    kept: list[str] = []
    counts: dict[str, int] = {}
    for level, line in _all(report, gate):
        counts[level] = counts.get(level, 0) + 1
        if counts[level] <= PER_LEVEL:
            kept.append(line)
    cut = sum(max(0, count - PER_LEVEL) for count in counts.values())
    if cut:
        kept.append(_command("notice", "annotations cut", f"{counted(cut, 'more is', 'more are')} in the report"))
    return kept
