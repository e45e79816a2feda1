"""Workflow commands that GitHub shows as annotations. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_compat.gate.model import GateReport
from mcore_compat.report.causes import causes
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
    parts.append(f"title={_property(title[:120])}")
    return f"::{level} {','.join(parts)}::{_data(shown)}"


def _all(report: Report | None, gate: GateReport | None) -> Iterator[tuple[str, str]]:
    for finding in gate.findings if gate else ():
        if finding.origin == "contract" and finding.state == "new" and finding.level != "info":
            words = "; ".join(f"{mode}: {text}" for mode, text in finding.consequence.items())
            place = f" ({finding.where})" if finding.where else ""
            level = _COMMANDS[severity(finding.weight)]
            yield level, _command(level, finding.title, f"{finding.message}{place}. {words}")
    for cause in causes(report) if report else ():
        level = _COMMANDS[severity(cause.finding.weight)]
        file = (cause.finding.check or "").partition("::")[0]
        path = f"tests/compat/{file}" if file.endswith(".py") else None
        yield level, _command(level, cause.title, f"{cause.finding.message}\nCells: {', '.join(cause.cells)}", path)


def render_annotations(report: Report | None, gate: GateReport | None = None) -> list[str]:
    """At most ten of a level; a last line counts what was cut."""
    kept: list[str] = []
    counts: dict[str, int] = {}
    for level, line in _all(report, gate):
        counts[level] = counts.get(level, 0) + 1
        if counts[level] <= PER_LEVEL:
            kept.append(line)
    cut = sum(max(0, count - PER_LEVEL) for count in counts.values())
    if cut:
        kept.append(_command("notice", "annotations cut", f"{cut} more are in the report"))
    return kept
