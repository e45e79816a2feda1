"""The gate's verdict and the next step in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_compat.gate.compare import excused
from mcore_compat.gate.model import GateFinding, Side, Tier
from mcore_compat.verdicts import Verdict

__all__ = ["decide", "next_step_of"]

_NOT_JUDGED = (Verdict.UNRESOLVABLE, Verdict.INFRA)


def decide(
    baseline: Side, candidate: Side, tiers: Sequence[Tier], findings: Sequence[GateFinding]
) -> tuple[Verdict, str]:
    """Verdict and its reason. What both sides share is reported and does not count against the candidate."""
    verdict, reason = _by_findings(baseline, candidate, tiers, findings)
    if verdict.green and candidate.cell is not None and (baseline.cell is None or baseline.cell.verdict.green):
        # Whatever the findings say: a cell that is not green beside a green one is never a reason to move.
        cell = candidate.cell if baseline.cell is None else excused(candidate.cell, baseline.cell)
        if not cell.verdict.green:
            return cell.verdict, cell.reason or cell.verdict.meaning
    return verdict, reason


def _by_findings(
    baseline: Side, candidate: Side, tiers: Sequence[Tier], findings: Sequence[GateFinding]
) -> tuple[Verdict, str]:
    new = [f for f in findings if f.state == "new"]
    broken = [f for f in new if f.weight == "break"]
    if candidate.cell is not None and candidate.cell.verdict in _NOT_JUDGED:
        return candidate.cell.verdict, candidate.cell.reason
    if broken:
        # A reproduced contract finding says why; a failed check only that.
        first = min(broken, key=lambda f: (f.witness != "confirmed", f.origin != "cell"))
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        if first.upstream:
            own = sum(f.upstream for f in broken)
            more += (
                f"; {own} of {len(broken)} failures are broken upstream, not by us (none of our code is on their stack)"
            )
        return Verdict.BREAK, f"{_said(first)}{more}"
    if baseline.cell is not None and baseline.cell.verdict in _NOT_JUDGED:
        return Verdict.UNPROVEN, f"the baseline could not be judged: {baseline.cell.reason}"
    flaky = [f for f in findings if f.state == "flaky"]
    if flaky:
        return Verdict.UNPROVEN, f"the second run of the same environments gave another result: {_said(flaky[0])}"
    ran = {tier.name for tier in tiers if tier.ran}
    if not ran & {"cpu", "gpu"}:
        return Verdict.UNPROVEN, "the sources show nothing that breaks; no cell was run"
    unproven = [f for f in new if f.level == "unproven"]
    if unproven:
        return Verdict.UNPROVEN, _said(unproven[0])
    shared = [f for f in findings if f.state == "same" and f.origin == "cell" and f.level in {"break", "unproven"}]
    unseen = [f for f in shared if f.level == "unproven"]
    if unseen:
        # A failure that was there before is knowledge; what neither side has shown is none.
        return Verdict.UNPROVEN, f"nothing is new, but neither side is proved: {_said(unseen[0])}"
    failures = "1 failure" if len(shared) == 1 else f"{len(shared)} failures"
    suffix = f"; {failures} on both sides" if shared else ""
    suffix += "" if "cpu" in ran else "; GPU cells only, `mcore-compat gate` runs the CPU cells"
    declared = [f for f in new if f.level == "drift" and f.origin == "cell" and "::" in f.title]
    if declared:
        first = declared[0]
        whose = ", broken upstream and not by us" if first.upstream else ""
        return Verdict.DRIFT, f"a declared failure that the baseline does not have{whose}: {_said(first)}{suffix}"
    drifted = [f for f in new if f.weight == "drift"]
    if drifted or (candidate.modes != baseline.modes):
        seen = next((f for f in drifted if f.origin != "contract"), None)
        if seen is not None:
            return Verdict.DRIFT, f"{_said(seen) if seen.origin == 'usage' else seen.headline}{suffix}"
        what = drifted[0].headline if drifted else _moved(baseline.modes, candidate.modes)
        return Verdict.DRIFT, f"upstream's surface changed and behaviour is equal: {what}{suffix}"
    return Verdict.OK, f"nothing that we depend on changed for the worse{suffix}"


def _moved(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> str:
    """Which models are served otherwise than before."""
    models = [model for model in dict.fromkeys((*before, *after)) if before.get(model) != after.get(model)]
    return ", ".join(
        f"{model} models move from {before.get(model) or 'not served'} to {after.get(model) or 'not served'}"
        for model in models
    )


def _said(finding: GateFinding) -> str:
    """A finding in one line; a check, a kind or a line of source is named before it, a rule's sentence stands alone."""
    if finding.origin == "contract":
        return finding.headline
    return f"{finding.source or finding.title}: {finding.headline}"


def next_step_of(verdict: Verdict, candidate: Side, findings: Sequence[GateFinding]) -> str:
    """What to do now, in one sentence."""
    new = [f for f in findings if f.state == "new" and f.weight == "break"]
    modes = sorted({mode for f in new for mode in f.consequence if mode != "copy"})
    known = candidate.cell is not None and not candidate.cell.id.startswith("candidate")
    keep = "" if known else "; add it to compat_matrix/matrix.toml, so that nightly runs keep it"
    keep += f", but read first why it was withdrawn ({candidate.note})" if candidate.note else ""
    if verdict is Verdict.OK:
        return f"Move to {candidate.name}{keep}."
    if verdict is Verdict.DRIFT:
        return f"Read what moved, then move to {candidate.name}{keep}."
    if verdict is Verdict.BREAK:
        where = f" (affected: {', '.join(modes)})" if modes else ""
        cause = next((f.next_step for f in new if f.next_step), "")
        if new and all(f.upstream for f in new):
            return f"Report it upstream, and stay on the baseline if the feature is used. {cause}".strip()
        if new and all(f.origin == "usage" for f in new):
            return f"Correct the lines that the findings name, or stay on the baseline. {cause}".strip()
        return f"Stay on the baseline{where}; find the change with `mcore-compat bisect`. {cause}".strip()
    if verdict is Verdict.UNRESOLVABLE:
        return "Change the requirement named in the reason, or the cell's constraints in compat_matrix/matrix.toml."
    if any(f.state == "flaky" for f in findings):
        return (
            "Find out why the check is not stable before you trust it on either side; a second run never makes it pass."
        )
    if candidate.cell is None:
        return "Run the gate without --static: only cells that ran can make it green."
    return "Correct what the reason names, and run the gate again."
