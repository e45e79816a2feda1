"""The gate's report for people: a screen of text, and Markdown for a CI summary. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_compat.gate.model import GateFinding, GateReport, Side
from mcore_compat.subjects.selection import DEFAULT_SUBJECT

__all__ = ["markdown", "text"]

_STATES = ("new", "flaky", "fixed", "same")
_HEADINGS = {
    "new": "New with the candidate",
    "flaky": "Not stable: another result in the second run",
    "fixed": "Gone with the candidate",
    "same": "On both sides",
}


def _labels(side: Side) -> str:
    said = [f"distribution {side.distribution or 'without metadata'}"]
    if side.attribute != side.distribution:
        said.append(f"__version__ {side.attribute or 'not found'}")
    if side.commit:
        said.append(f"commit {side.commit[:12]}")
    if side.nearest and side.nearest != side.name:
        said.append(f"surface nearest to {side.nearest}")
    modes = ", ".join(f"{model} {mode or 'not served'}" for model, mode in side.modes.items())
    cell = f"; cell {side.cell.verdict.value}, {side.cell.checks.passed} checks passed" if side.cell else ""
    return f"{side.name} ({', '.join(said)}): {modes}{cell}"


def _shown(findings: Iterable[GateFinding], everything: bool) -> list[GateFinding]:
    return [f for f in findings if everything or (f.level != "info" and (f.state != "same" or f.origin == "cell"))]


def _grouped(findings: Iterable[GateFinding]) -> list[tuple[GateFinding, int]]:
    """What is said of several checks in one message, or of several models at one place, told once with the number."""
    groups: dict[tuple[str | bool | None, ...], list[GateFinding]] = {}
    for finding in findings:
        key = (
            ("cell", finding.level, finding.upstream, finding.signature)
            if finding.origin == "cell"
            else (finding.title, finding.level, finding.message, finding.where, finding.witness)
        )
        groups.setdefault(key, []).append(finding)
    return [(group[0], len(group) - 1) for group in groups.values()]


def _others(finding: GateFinding, count: int) -> str:
    what = "checks with this message" if finding.origin == "cell" else "at this place, of another model"
    more = f" (+{count} more {what})" if count else ""
    return f"{more} [broken upstream, not by us]" if finding.upstream else more


def _witness(finding: GateFinding) -> str:
    if finding.witness == "none":
        return ""
    note = f" ({finding.witness_note})" if finding.witness_note else ""
    return f"witness {finding.witness}{note}"


def text(report: GateReport, *, everything: bool = False) -> str:
    """One screen for a terminal."""
    lines = [f"{report.verdict.value.upper()}: {report.reason}", f"next: {report.next_step}", ""]
    lines += [f"subject    {report.judged}"] if report.judged != DEFAULT_SUBJECT else []
    lines += [f"baseline   {_labels(report.baseline)}", f"candidate  {_labels(report.candidate)}"]
    ran = ", ".join(f"{t.name} {t.seconds:.0f} s" if t.ran else f"{t.name} not run: {t.note}" for t in report.tiers)
    lines.append(f"tiers      {ran}")
    chosen = _shown(report.findings, everything)
    for state in _STATES:
        group = [finding for finding in chosen if finding.state == state]
        if group:
            lines += ["", f"{_HEADINGS[state]} ({len(group)})"]
        for finding, more in _grouped(group):
            lines.append(
                f"  [{finding.weight}] {finding.title}: {finding.message.partition(chr(10))[0]}{_others(finding, more)}"
            )
            details = (
                [finding.where or "", _witness(finding)] if finding.origin == "contract" else [finding.witness_note]
            )
            lines += [f"      {detail}" for detail in details if detail]
            if state == "new":
                lines += [f"      {mode}: {words}" for mode, words in finding.consequence.items() if mode != "copy"]
    hidden = len(report.findings) - len(chosen)
    if hidden:
        lines += ["", f"{hidden} more notes (gate.json has them all)"]
    return "\n".join(lines) + "\n"


def markdown(report: GateReport, *, budget: int = 60_000) -> str:
    """Markdown within a budget of characters; what is cut is counted."""
    head = [
        f"# {report.verdict.value}: {report.baseline.name} → {report.candidate.name}",
        "",
        f"{report.reason}",
        "",
        f"**Next step:** {report.next_step}",
        "",
        *([f"- subject: {report.judged}"] if report.judged != DEFAULT_SUBJECT else []),
        f"- baseline: {_labels(report.baseline)}",
        f"- candidate: {_labels(report.candidate)}",
        *(f"- {t.name}: {f'{t.seconds:.0f} s' if t.ran else f'not run, {t.note}'}" for t in report.tiers),
        "",
    ]
    size = sum(len(line) + 1 for line in head)
    body: list[str] = []
    cut = 0
    for state in _STATES:
        group = [finding for finding in _shown(report.findings, everything=False) if finding.state == state]
        rows = [f"## {_HEADINGS[state]} ({len(group)})", ""] if group else []
        for finding, more in _grouped(group):
            place = f" `{finding.where}`" if finding.where else ""
            witness = f" _{_witness(finding)}_" if _witness(finding) else ""
            link = f" [more]({finding.link})" if finding.link else ""
            consequence = "".join(f"\n  - {m}: {w}" for m, w in finding.consequence.items()) if state == "new" else ""
            message = finding.message.partition("\n")[0][:400] + _others(finding, more)
            row = f"- **{finding.weight}** {finding.title}: {message}{place}{witness}{link}{consequence}"
            if size + len(row) > budget:
                cut += 1 + more
                continue
            size += len(row) + 1
            rows.append(row)
        body += [*rows, ""] if rows else []
    if cut:
        body += [f"_{cut} findings are cut here; gate.json has them all._", ""]
    return "\n".join([*head, *body]).rstrip() + "\n"
