"""The report as Markdown, sized for a CI job's summary. Pure over the report."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_compat.report.causes import Cause, causes
from mcore_compat.report.terminal import summary_line
from mcore_compat.results import CellResult, Report

__all__ = ["render", "table"]

_REASON = 140
_MESSAGE_LINES = 12
# GitHub refuses a job summary above 1 MiB and an issue body above 65,536 characters.
_LIMIT = 60_000


def render(report: Report) -> str:
    """The whole report; causes and notes that do not fit are counted, not cut in the middle."""
    head = [
        f"# {report.verdict.value}: megatron-core compatibility of {report.subject.judged}",
        "",
        f"{summary_line(report)}.",
        "",
        f"Subject: {report.subject.title}; profile `{report.profile}`, run `{report.run_id}`, from {report.started}.",
        "",
        table(report.cells),
    ]
    body, shown = "\n".join(head), 0
    found = causes(report)
    texts = [_cause(cause) for cause in found if cause.verdict is not None]
    notes = [_note(cause) for cause in found[len(texts) :]]
    if notes:
        notes[0] = f"\n## Notes\n\n{notes[0]}"
    for text in [*texts, *notes]:
        if len(body) + len(text) > _LIMIT:
            break
        body += text
        shown += 1
    if shown < len(found):
        body += f"\n… {len(found) - shown} of {len(found)} causes are left out here; report.json has all.\n"
    return body


def table(cells: Sequence[CellResult]) -> str:
    """One row a cell."""
    rows = [
        "| megatron-core | verdict | mode | checks | kernel runs | torch | device | seconds | reason |",
        "|---|---|---|---:|---:|---|---|---:|---|",
    ]
    rows += [
        f"| {cell.id} | {cell.verdict.value} | {cell.mode or '-'} | {cell.checks.passed}/{cell.checks.planned} "
        f"| {cell.evidence.kernel_launches} | {cell.torch or '-'} | {cell.device or '-'} "
        f"| {cell.seconds.provision + cell.seconds.suite:.0f} | {_cell_text(cell.reason)} |"
        for cell in cells
    ]
    return "\n".join(rows) + "\n"


def _note(cause: Cause) -> str:
    link = f" [more]({cause.finding.link})" if cause.finding.link else ""
    return f"- {_escaped(cause.told)}; {cause.since}{link}\n"


def _cause(cause: Cause) -> str:
    lines = cause.finding.message.splitlines()[:_MESSAGE_LINES]
    block = "\n".join(lines).replace("```", "'''")
    touched = f" Cells: {', '.join(cause.cells)}." if cause.cells else ""
    return f"\n## {_cell_text(cause.title)}\n\n{cause.level}, {cause.since}.{touched}\n\n```text\n{block}\n```\n" + (
        f"\nNext step: {cause.finding.next_step}\n" if cause.finding.next_step else ""
    )


def _cell_text(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    cut = first if len(first) <= _REASON else first[: _REASON - 1] + "…"
    return _escaped(cut).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")
