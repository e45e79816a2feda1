"""A bisection for people. Pure."""

from __future__ import annotations

from mcore_compat.bisect.run import Bisected
from mcore_compat.contract.rules.predicates import shown

__all__ = ["text"]

_MAX_CHANGES = 10


def text(result: Bisected) -> str:
    """The first bad one, the contract item, upstream's change."""
    found = result.found
    first = result.source or found.bad
    lines = [
        f"first: {first}",
        f"last before it: {found.good[:12]}",
        f"asked: {result.question} ({found.asked} judged)",
    ]
    if found.unknown:
        lines.append(f"not judged between them: {', '.join(name[:12] for name in found.unknown)}")
    if result.findings:
        lines.append("")
    for finding in result.findings:
        state = "gone" if finding.state.value == "fixed" else finding.state.value
        lines.append(f"[{state} {finding.level}] {finding.text} ({finding.rule.id})")
        if finding.where:
            lines.append(f"    at {finding.where}")
    if result.changes:
        lines += ["", "contract items that read otherwise:"]
    # Those that a rule speaks of first.
    named = {finding.item for finding in result.findings}
    changes = sorted(result.changes, key=lambda change: change[0] not in named)
    for item, before, after in changes[:_MAX_CHANGES]:
        lines += [f"  {item}", f"    before: {shown(before)}", f"    after:  {shown(after)}"]  # type: ignore[arg-type]
    if len(changes) > _MAX_CHANGES:
        lines.append(f"  … and {len(changes) - _MAX_CHANGES} more: {', '.join(c[0] for c in changes[_MAX_CHANGES:])}")
    if result.diff:
        lines += ["", "upstream's change:", result.diff]
    return "\n".join(lines) + "\n"
