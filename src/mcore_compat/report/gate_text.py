"""The gate's report for people: a screen of text, and Markdown for a CI summary. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mcore_compat.gate.model import GateReport, Side
from mcore_compat.report.answer import answer_of_gate, counted
from mcore_compat.report.causes import HEADINGS, STATES, Cause, gate_causes
from mcore_compat.report.clean import cleaned, sentence, shortened
from mcore_compat.subjects.selection import DEFAULT_SUBJECT

__all__ = ["markdown", "text"]

_LINE = 240
_NOT_OURS = "copy"  # a consequence for patches that copy upstream's forward
_CHECKS = 3
_MARKDOWN_CHECKS = 20


def _labels(side: Side) -> str:
    said = [side.note] if side.note else []
    said += [f"distribution {side.distribution or 'without metadata'}"]
    if side.attribute != side.distribution:
        said.append(f"__version__ {side.attribute or 'not found'}")
    if side.commit:
        said.append(f"commit {side.commit[:12]}")
    if side.nearest and side.nearest != side.name:
        said.append(f"surface nearest to {side.nearest}")
    modes = ", ".join(f"{model} {mode or 'not served'}" for model, mode in side.modes.items())
    cell = f"; cell {side.cell.verdict.label}, {counted(side.cell.checks.passed, 'check')} passed" if side.cell else ""
    return f"{side.name} ({', '.join(said)}): {modes}{cell}"


def _selected(found: Iterable[Cause], everything: bool) -> list[Cause]:
    """What is worth a line: notes, and what the sources of both sides have in common, only if asked for."""
    return [c for c in found if everything or (c.level != "note" and (c.state != "same" or not c.in_source))]


def _marks(cause: Cause) -> str:
    models = f" (also in {counted(cause.models - 1, 'other model')})" if cause.models > 1 else ""
    return models + (" [broken upstream, not by us]" if cause.upstream else "")


def _about(cause: Cause) -> str:
    return f"{cause.scope}: " if cause.checks and not cause.in_source else f"{cause.kind}: "


def _named_by(cause: Cause, limit: int) -> str:
    """Checks below a finding in the source."""
    if not cause.in_source or not cause.checks:
        return ""
    more = f" and {len(cause.checks) - limit} more" if len(cause.checks) > limit else ""
    return f"{counted(len(cause.checks), 'failing check')} name it: {', '.join(cause.checks[:limit])}{more}"


def _details(cause: Cause) -> Iterator[str]:
    if cause.source:
        yield f"at {cause.source}" + (f"; upstream's {cause.where}" if cause.where else "")
    elif cause.where:
        yield f"at {cause.where}"
    yield from cause.change
    if cause.reproducer:
        yield shortened(cause.reproducer, _LINE)
    if cause.remark:
        yield shortened(cause.remark, _LINE)
    if cause.state == "new":
        yield from (f"{mode}: {words}" for mode, words in cause.consequences.items() if mode != _NOT_OURS)
        if named := _named_by(cause, _CHECKS):
            yield named


def text(report: GateReport, *, everything: bool = False) -> str:
    """One screen for a terminal: question, answer, next step, both sides, causes."""
    report = cleaned(report)
    answer, found = answer_of_gate(report), gate_causes(report)
    lines = [
        answer.question,
        f"{answer.label}: {answer.answer} {sentence(report.reason)}",
        f"Next step: {report.next_step}",
        "",
    ]
    lines += [f"subject    {report.judged}"] if report.judged != DEFAULT_SUBJECT else []
    lines += [f"baseline   {_labels(report.baseline)}", f"candidate  {_labels(report.candidate)}"]
    ran = ", ".join(f"{t.name} {t.seconds:.0f} s" if t.ran else f"{t.name} not run: {t.note}" for t in report.tiers)
    lines.append(f"steps      {ran}")
    chosen = _selected(found, everything)
    for state in STATES:
        group = [cause for cause in chosen if cause.state == state]
        if group:
            lines += ["", f"{HEADINGS[state]} ({counted(len(group), 'cause')})"]
        for cause in group:
            lines.append(f"  [{cause.level}] {_about(cause)}{shortened(cause.headline, _LINE)}{_marks(cause)}")
            lines += [f"      {detail}" for detail in _details(cause)]
    hidden = len(found) - len(chosen)
    if hidden:
        lines += ["", f"{counted(hidden, 'more note')}; --all prints them, gate.json has everything."]
    return "\n".join(lines) + "\n"


def _plain(words: str) -> str:
    """Markdown in which text stays text, apart from code in backticks."""
    return words.replace("<", "&lt;").replace(">", "&gt;")


def _item(cause: Cause) -> str:
    place = f" at `{cause.source or cause.where}`" if cause.source or cause.where else ""
    link = f" ([more]({cause.link}))" if cause.link else ""
    rows = [
        f"- **{cause.level}** {_about(cause)}{_plain(shortened(cause.headline, 400))}{_marks(cause)}{place}{link}",
        *(f"  - {_plain(shortened(words, _LINE))}" for words in (cause.reproducer, cause.remark) if words),
    ]
    if cause.change:
        rows += ["", "  ```diff", *(f"  {line}" for line in cause.change), "  ```", ""]
    if cause.state == "new":
        rows += [f"  - {mode}: {_plain(words)}" for mode, words in cause.by_mode]
        named = _named_by(cause, _MARKDOWN_CHECKS)
        rows += [f"  - {named}"] if named else []
    if not cause.in_source and len(cause.checks) > 1:
        shown = ", ".join(f"`{check}`" for check in cause.checks[:_MARKDOWN_CHECKS])
        more = len(cause.checks) - _MARKDOWN_CHECKS
        rows.append(f"  - checks: {shown}" + (f" and {more} more" if more > 0 else ""))
    return "\n".join(rows)


def markdown(report: GateReport, *, budget: int = 60_000) -> str:
    """Markdown within a budget of characters; what is cut is counted."""
    report = cleaned(report)
    answer = answer_of_gate(report)
    head = [
        f"# {_plain(answer.question)}",
        "",
        f"**{answer.answer}** `{report.verdict.label}`: {_plain(sentence(report.reason))}",
        "",
        f"**Next step:** {_plain(report.next_step)}",
        "",
        *([f"- subject: {report.judged}"] if report.judged != DEFAULT_SUBJECT else []),
        f"- baseline: {_plain(_labels(report.baseline))}",
        f"- candidate: {_plain(_labels(report.candidate))}",
        *(f"- {t.name}: {f'{t.seconds:.0f} s' if t.ran else f'not run, {t.note}'}" for t in report.tiers),
        "",
    ]
    size = sum(len(line) + 1 for line in head)
    chosen = _selected(gate_causes(report), everything=False)
    body: list[str] = []
    cut = 0
    for state in STATES:
        group = [cause for cause in chosen if cause.state == state]
        rows = [f"## {HEADINGS[state]} ({counted(len(group), 'cause')})", ""] if group else []
        for cause in group:
            row = _item(cause)
            if size + len(row) > budget:
                cut += 1
                continue
            size += len(row) + 1
            rows.append(row)
        body += [*rows, ""] if rows else []
    if cut:
        body += [f"_{counted(cut, 'cause')} left out here; gate.json has everything._", ""]
    return "\n".join([*head, *body]).rstrip() + "\n"
