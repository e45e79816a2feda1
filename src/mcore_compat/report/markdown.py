"""The report as Markdown, sized for a CI job's summary. Pure over the report."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_compat.report.answer import answer_of_run, counted
from mcore_compat.report.causes import Cause, causes
from mcore_compat.report.clean import cleaned, shortened
from mcore_compat.report.terminal import summary_line
from mcore_compat.results import CellResult, Report

__all__ = ["render", "table"]

_REASON = 140
_MESSAGE_LINES = 12
_CHECKS = 20
# GitHub refuses a job summary above 1 MiB and an issue body above 65,536 characters.
_LIMIT = 60_000


def render(report: Report) -> str:
    """The whole report; causes and notes that do not fit are counted, not cut in the middle."""
    report = cleaned(report)
    found = causes(report)
    answer = answer_of_run(report, found)
    head = [
        f"# {report.verdict.label}: megatron-core compatibility of {report.subject.judged}",
        "",
        f"{_escaped(answer.question)} **{answer.answer}**",
        *(["", f"**Next step:** {_escaped(answer.next_step)}"] if answer.next_step else []),
        "",
        f"{_escaped(summary_line(report))}.",
        "",
        *([_links(report), ""] if report.subject.links else []),
        f"Subject: {report.subject.title}; profile `{report.profile}`, run `{report.run_id}`, from {report.started}.",
        "",
        table(report.cells),
    ]
    body, shown = "\n".join(head), 0
    texts = [_cause(cause) for cause in found if cause.level != "note"]
    notes = [_note(cause) for cause in found[len(texts) :]]
    if notes:
        notes[0] = f"\n## Notes\n\n{notes[0]}"
    for text in [*texts, *notes]:
        if len(body) + len(text) > _LIMIT:
            break
        body += text
        shown += 1
    if shown < len(found):
        body += f"\n… {len(found) - shown} of {counted(len(found), 'cause')} are left out here; report.json has all.\n"
    return body


def _links(report: Report) -> str:
    return " · ".join(f"[{_cell_text(text)}]({address})" for text, address in report.subject.links.items())


def table(cells: Sequence[CellResult]) -> str:
    """One row per cell."""
    rows = [
        "| megatron-core | verdict | mode | checks | fused runs | torch | device | seconds | reason |",
        "|---|---|---|---:|---:|---|---|---:|---|",
    ]
    rows += [
        f"| {cell.id} | {cell.verdict.label} | {cell.mode or '-'} | {cell.checks.passed}/{cell.checks.planned} "
        f"| {cell.evidence.kernel_launches} | {cell.torch or '-'} | {cell.device or '-'} "
        f"| {cell.seconds.provision + cell.seconds.suite:.0f} | {_cell_text(cell.reason)} |"
        for cell in cells
    ]
    return "\n".join(rows) + "\n"


def _note(cause: Cause) -> str:
    link = f" [more]({cause.link})" if cause.link else ""
    return f"- {_escaped(cause.told)}; {cause.since}{link}\n"


def _cause(cause: Cause) -> str:
    lines = cause.message.splitlines()[:_MESSAGE_LINES]
    block = "\n".join(lines).replace("```", "'''")
    touched = f" Cells: {', '.join(cause.cells)}." if cause.cells else ""
    checks = ""
    if len(cause.checks) > 1:
        more = f" and {len(cause.checks) - _CHECKS} more" if len(cause.checks) > _CHECKS else ""
        checks = f"\nChecks: {', '.join(f'`{check}`' for check in cause.checks[:_CHECKS])}{more}.\n"
    next_step = f"\nNext step: {_escaped(cause.next_step)}\n" if cause.next_step else ""
    head = f"\n## {_cell_text(cause.title)}\n\n{cause.level}, {cause.since}.{touched}\n"
    return f"{head}\n```text\n{block}\n```\n{checks}{next_step}"


def _cell_text(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return _escaped(shortened(first, _REASON)).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")
