"""A bisection for people. Pure."""

from __future__ import annotations

from mcore_compat.bisect.run import Bisected
from mcore_compat.contract.rules.compare import FindingState
from mcore_compat.contract.rules.predicates import shown
from mcore_compat.files.untrusted import printable
from mcore_compat.report.answer import counted

__all__ = ["text"]

_MAX_CHANGES = 10
_STATES = {
    FindingState.NEW: "now true",
    FindingState.FIXED: "no longer true",
    FindingState.SAME: "still true",
}


def text(result: Bisected) -> str:
    """The first bad one, what the rules say of it, the contract items that changed, upstream's change."""
    found = result.found
    first = result.source or found.bad
    lines = [
        f"first: {first}",
        f"last before it: {found.good[:12]}",
        f"searched for: {result.question} ({counted(found.asked, 'candidate')} examined)",
    ]
    if found.unknown:
        lines.append(f"Could not be judged between them: {', '.join(name[:12] for name in found.unknown)}.")
    if result.findings:
        lines += ["", "What the rules say of this step:"]
    for finding in result.findings:
        lines.append(f"{_STATES[finding.state]} [{finding.level}]: {finding.text} (rule {finding.rule.id})")
        if finding.where:
            lines.append(f"    at {finding.where}")
    if result.changes:
        lines += ["", "Changed contract items:"]
    # Those that a rule is about come first.
    named = {finding.item for finding in result.findings}
    changes = sorted(result.changes, key=lambda change: change[0] not in named)
    for item, before, after in changes[:_MAX_CHANGES]:
        lines += [f"  {item}", f"    before: {shown(before)}", f"    after:  {shown(after)}"]  # type: ignore[arg-type]
    if len(changes) > _MAX_CHANGES:
        lines.append(f"  … and {len(changes) - _MAX_CHANGES} more: {', '.join(c[0] for c in changes[_MAX_CHANGES:])}")
    if result.others:
        lines += ["", f"{result.others} other contract items changed; see `mcore-compat contract diff --all`."]
    if result.diff:
        lines += ["", "Upstream's change:", result.diff]
    return printable("\n".join(lines)) + "\n"
