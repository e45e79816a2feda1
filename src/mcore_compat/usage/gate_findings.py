"""What the gate asks before it makes any environment: does the source in this folder fit the candidate?"""

from __future__ import annotations

from pathlib import Path

from mcore_compat.contract.source.candidate import Candidate
from mcore_compat.usage.check import Side
from mcore_compat.usage.extract import extract_uses
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.matrix import assess
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.sources import open_source, patch_files
from mcore_compat.usage.targets import known_releases, open_tree
from mcore_compat.usage.upstream import SummaryCache

__all__ = ["usage_findings"]


def usage_findings(
    root: Path,
    candidate: Candidate,
    baseline: Candidate | None = None,
    include: tuple[str, ...] = (),
    cache: SummaryCache | None = None,
) -> tuple[UsageFinding, ...]:
    """Findings about the source below ``root`` with the candidate.

    Args:
        root: folder of the adopter's source.
        candidate: the Megatron that is to be judged.
        baseline: the Megatron that the source works with; with it only what the candidate adds is told, and also what
            fails silently.
        include: folders of the source; everything but its tests where empty.
        cache: of summaries; one is opened and closed where None.
    """
    opened = open_source(str(root), include=include)
    extracted = extract_uses(opened)
    store = cache or SummaryCache()
    releases = known_releases()
    try:
        named = [candidate] if baseline is None else [baseline, candidate]
        sides = [Side.of(Resolver(open_tree(one, releases, store), store), one.label) for one in named]
        pin = baseline.label if baseline is not None else None
        report = assess(extracted, sides, pin=pin, patches=patch_files(opened))
    finally:
        if cache is None:
            store.close()
    before = {f.key for f in report.columns[0].findings} if baseline is not None else set()
    return tuple(finding for finding in report.columns[-1].findings if finding.key not in before)
