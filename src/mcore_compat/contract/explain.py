"""A comparison in words, as text, Markdown or JSON; grouped by what it means for the modes of mcore_fused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import Finding, FindingState, expected_modes, level_of
from mcore_compat.contract.rules.rule import LEVELS, MODES, Rule

__all__ = ["Comparison", "as_json", "as_markdown", "as_text"]

# A finding of the baseline that the candidate does not have: what the sentence says no longer holds.
_STATE_WORDS = {FindingState.NEW: "new", FindingState.FIXED: "resolved", FindingState.SAME: "as before"}
_LEVEL_WORDS = {"break": "BREAK", "drift": "drift", "info": "note"}
_VERDICTS = {
    "break": "break: at least one of our modes would fail",
    "drift": "drift: the surface moved, our modes go on working",
    "info": "ok: what changed does not concern our modes",
    None: "ok: nothing that we depend on changed",
}


@dataclass(frozen=True)
class Comparison:
    """Two contracts and what the rules say; ``baseline`` is None where one contract is judged alone."""

    baseline: Contract | None
    candidate: Contract
    findings: tuple[Finding, ...]

    @property
    def level(self) -> str | None:
        """Worst level among what is new."""
        return level_of(self.findings)

    @property
    def verdict(self) -> str:
        """One line."""
        return _VERDICTS[self.level]

    @property
    def title(self) -> str:
        """What is compared."""
        before = f"{self.baseline.name} → " if self.baseline else ""
        return f"megatron-core {before}{self.candidate.name}"


def _modes(contract: Contract) -> str:
    parts = [f"{prefix} {mode or 'not served'}" for prefix, mode in expected_modes(contract).items()]
    return ", ".join(parts) or "no model class found"


def _heading(comparison: Comparison) -> list[str]:
    lines = [f"{comparison.title}: {comparison.verdict}"]
    if comparison.baseline is not None:
        lines.append(f"modes before: {_modes(comparison.baseline)}")
    lines.append(f"modes now:    {_modes(comparison.candidate)}")
    labels = comparison.candidate.labels
    if labels.disagree or labels.distribution is None:
        lines.append(f"labels:       {labels.describe()} (informational)")
    return lines


def _selected(findings: Iterable[Finding], everything: bool) -> list[Finding]:
    return [f for f in findings if everything or (f.state is not FindingState.SAME and f.level != "info")]


def _by_mode(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    groups = [(mode, [f for f in findings if mode in f.rule.consequence]) for mode in MODES]
    return [(mode, group) for mode, group in groups if group]


def _mark(finding: Finding) -> str:
    return f"{_STATE_WORDS[finding.state]} {_LEVEL_WORDS[finding.level]}"


def as_text(comparison: Comparison, *, everything: bool = False) -> str:
    """Plain text for a terminal.

    Args:
        comparison: what to show.
        everything: also notes, and findings that both sides have.
    """
    lines = _heading(comparison)
    chosen = _selected(comparison.findings, everything)
    for group in _by_rule(chosen):
        lines.append("")
        for finding in group:
            place = f"\n    at {finding.where}" if finding.where else ""
            lines.append(f"[{_mark(finding)}] {finding.text}{place}")
        rule = group[0].rule
        reproducer = "the gate runs a reproducer" if rule.witness else f"no reproducer: {rule.unwitnessed}"
        items = ", ".join(dict.fromkeys(finding.item for finding in group))
        lines.append(f"    rule {rule.id} ({rule.direction} {items}; {reproducer})")
        if group[0].state is not FindingState.FIXED:
            lines += [f"    {modes}: {words}" for modes, words in _consequences(rule).items()]
            lines.append(f"    see {rule.link}")
    hidden = len(comparison.findings) - len(chosen)
    if hidden:
        lines += ["", f"{_hidden(hidden)} (--all shows them)"]
    return "\n".join(lines) + "\n"


def _by_rule(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one rule and state together, in the order of the first of each."""
    groups: dict[tuple[str, FindingState], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule.id, finding.state), []).append(finding)
    return list(groups.values())


def _consequences(rule: Rule) -> dict[str, str]:
    """Consequence by modes; modes with the same one share a line."""
    shared: dict[str, list[str]] = {}
    for mode, words in rule.consequence.items():
        shared.setdefault(words, []).append(mode)
    return {", ".join(modes): words for words, modes in shared.items()}


def _hidden(count: int) -> str:
    noun, verb = ("finding", "does") if count == 1 else ("findings", "do")
    side = "is" if count == 1 else "are"
    return f"{count} more {noun} {verb} not affect mcore_fused or {side} on both sides"


def as_markdown(comparison: Comparison, *, everything: bool = False) -> str:
    """Markdown, one section per mode."""
    lines = [f"### {comparison.title}", "", f"**{comparison.verdict}**", ""]
    lines += [f"- {line}" for line in _heading(comparison)[1:]]
    chosen = _selected(comparison.findings, everything)
    for mode, group in _by_mode(chosen):
        lines += ["", f"#### {MODES[mode]}", ""]
        for finding in group:
            consequence = "" if finding.state is FindingState.FIXED else f" → {finding.rule.consequence[mode]}"
            place = f" (`{finding.where}`)" if finding.where else ""
            lines.append(
                f"- **{_mark(finding)}** {finding.text}{place}{consequence} [[{finding.rule.id}]({finding.rule.link})]"
            )
    hidden = len(comparison.findings) - len(chosen)
    if hidden:
        lines += ["", f"_{_hidden(hidden)}._"]
    return "\n".join(lines) + "\n"


def finding_record(finding: Finding) -> dict[str, Any]:
    """A finding as JSON data."""
    return {
        "rule": finding.rule.id,
        "level": finding.level,
        "direction": finding.rule.direction,
        "state": finding.state.value,
        "item": finding.item,
        "detail": finding.detail,
        "message": finding.text,
        "where": finding.where or None,
        "consequence": dict(finding.rule.consequence),
        "link": finding.rule.link,
        "old": finding.old,
        "new": finding.new,
    }


def as_json(comparison: Comparison) -> str:
    """Everything, as JSON with sorted keys."""
    data = {
        "schema_version": 1,
        "baseline": comparison.baseline.name if comparison.baseline else None,
        "candidate": comparison.candidate.name,
        "labels": {
            "distribution": comparison.candidate.labels.distribution,
            "attribute": comparison.candidate.labels.attribute,
            "commit": comparison.candidate.labels.commit,
        },
        "level": comparison.level,
        "verdict": comparison.verdict,
        "modes": expected_modes(comparison.candidate),
        "counts": {
            state.value: {
                level: sum(f.state is state and f.level == level for f in comparison.findings) for level in LEVELS
            }
            for state in FindingState
        },
        "findings": [finding_record(finding) for finding in comparison.findings],
    }
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
