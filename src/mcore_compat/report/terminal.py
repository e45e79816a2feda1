"""The report on one screen of a terminal. Pure over the report: returns what rich prints."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mcore_compat.report.answer import counted
from mcore_compat.report.causes import Cause, causes
from mcore_compat.report.clean import cleaned
from mcore_compat.results import CellResult, Report
from mcore_compat.subjects.selection import DEFAULT_SUBJECT
from mcore_compat.verdicts import Verdict

__all__ = ["render", "summary_line"]

_COLOURS: Mapping[Verdict, str] = {
    Verdict.OK: "green",
    Verdict.DRIFT: "cyan",
    Verdict.BREAK: "bold red",
    Verdict.UNRESOLVABLE: "yellow",
    Verdict.INFRA: "magenta",
    Verdict.UNPROVEN: "yellow",
}
_STYLES: Mapping[str, str] = {verdict.value: style for verdict, style in _COLOURS.items()} | {"note": "dim"}
_CAUSES = 6
_NOTES = 8
_MESSAGE_LINES = 4


def render(report: Report) -> RenderableType:
    """Table, causes, notes, one closing line."""
    report = cleaned(report)
    parts: list[RenderableType] = [_table(report)]
    found = causes(report)
    held = [cause for cause in found if cause.level != "note"]
    notes = found[len(held) :]
    parts += [_cause(cause) for cause in held[:_CAUSES]]
    if len(held) > _CAUSES:
        parts.append(Text(f"… and {counted(len(held) - _CAUSES, 'more cause')} in report.md", style="dim"))
    if notes:
        parts.append(Text())
    parts += [Text(f"note: {note.told}; {note.since}", style="dim") for note in notes[:_NOTES]]
    if len(notes) > _NOTES:
        parts.append(Text(f"… and {counted(len(notes) - _NOTES, 'more note')} in report.md", style="dim"))
    parts.append(Text(summary_line(report), style=_COLOURS[report.verdict]))
    return Group(*parts)


def summary_line(report: Report) -> str:
    """Verdict, counts and time in one line."""
    counts = {verdict: sum(cell.verdict is verdict for cell in report.cells) for verdict in Verdict}
    cells = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    passed = sum(cell.checks.passed for cell in report.cells)
    planned = sum(cell.checks.planned for cell in report.cells)
    minutes, seconds = divmod(round(report.seconds), 60)
    other = "" if report.subject.judged == DEFAULT_SUBJECT else f"subject {report.subject.judged}, "
    left_out = sum(cell.checks.not_applicable for cell in report.cells)
    reused = sum(cell.reused_from is not None for cell in report.cells)
    return (
        f"{report.verdict.label}: {other}{counted(len(report.planned), 'cell')} ({cells or 'none judged'}), "
        + (f"{reused} of them judged in earlier runs, " if reused else "")
        + f"{passed} of {planned} checks passed, "
        + (f"{counted(left_out, 'check does', 'checks do')} not apply, " if left_out else "")
        + f"{minutes} min {seconds:02d} s"
    )


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", no_wrap=True, min_width=max((len(cell.id) for cell in report.cells), default=4))
    table.add_column("verdict", no_wrap=True, min_width=8)
    table.add_column("mode", no_wrap=True, min_width=6)
    table.add_column("checks", justify="right", no_wrap=True, min_width=6)
    table.add_column("time", justify="right", no_wrap=True, min_width=6)
    table.add_column("reason", overflow="ellipsis")
    for cell in report.cells:
        table.add_row(
            cell.id,
            Text(cell.verdict.value, style=_COLOURS[cell.verdict]),
            cell.mode or "-",
            f"{cell.checks.passed}/{cell.checks.planned}",
            f"{_time(cell):.0f} s",
            Text(cell.reason.split("\n")[0], no_wrap=True, overflow="ellipsis"),
        )
    return table


def _time(cell: CellResult) -> float:
    return cell.seconds.provision + cell.seconds.suite


def _cause(cause: Cause) -> Text:
    text = Text("\n")
    text.append(cause.title, style="bold")
    text.append(f"  {cause.level}, {cause.since}\n", style=_STYLES[cause.level])
    lines = cause.message.splitlines()
    # Without a check the title is the first line already.
    for line in lines[0 if cause.checks else 1 :][:_MESSAGE_LINES]:
        text.append(f"  {line}\n")
    if cause.next_step:
        text.append(f"  next: {cause.next_step}\n", style="dim")
    return text
