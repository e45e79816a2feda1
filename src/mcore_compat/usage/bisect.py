"""The first upstream commit from which on a finding holds, by binary search over the commits of the files concerned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_compat.contract.source.git import GitError, describe_commit, git, resolve_commit
from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.extract import Extracted
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.matrix import UsageReport
from mcore_compat.usage.model import Use
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.upstream import SummaryCache, git_tree

__all__ = ["first_bad_commit", "ref_of", "with_first_commits"]


def ref_of(label: str) -> str:
    """The git name of a Megatron's label: a release's tag, or the ref after ``@``."""
    return f"core_v{label}" if label[:1].isdigit() else label.rpartition("@")[2] or label


def with_first_commits(report: UsageReport, extracted: Extracted, clone: Path, cache: SummaryCache) -> UsageReport:
    """The report with ``commit`` filled in wherever the clone has both ends."""
    found: dict[tuple[tuple[str, str, int, str], str, str], str] = {}

    def filled(finding: UsageFinding) -> UsageFinding:
        if not finding.good:
            return finding
        key = (finding.key, finding.good, finding.first_bad)
        if key not in found:
            own = [u for u in extracted.uses if (u.file, u.line) == (finding.file, finding.line)]
            try:
                commit = first_bad_commit(clone, finding, own, cache)
            except GitError:  # a release without a tag, or a commit of another repository
                commit = ""
            found[key] = describe_commit(clone, commit) if commit else ""
        return replace(finding, commit=found[key])

    columns = tuple(replace(c, findings=tuple(filled(f) for f in c.findings)) for c in report.columns)
    return replace(report, columns=columns)


def first_bad_commit(clone: Path, finding: UsageFinding, uses: Sequence[Use], cache: SummaryCache) -> str:
    """Full id of the commit, "" if the line of history between the two ends does not show it.

    Releases are branches, so the search starts where the good release's branch left the bad one's line.

    Raises:
        GitError: an end is not in the clone.
    """
    good, bad = resolve_commit(clone, ref_of(finding.good)), resolve_commit(clone, ref_of(finding.first_bad))
    base = git(clone, ["merge-base", good, bad]).decode().strip()
    reference = Side.of(Resolver(git_tree(clone, base), cache))
    last = Resolver(git_tree(clone, bad), cache)

    def is_bad(resolver: Resolver) -> bool:
        return any(f.key == finding.key for f in check_uses(uses, Side.of(resolver), reference))

    if is_bad(reference.resolver) or not is_bad(last):
        return ""
    touched = sorted(p for p in reference.resolver.touched | last.touched if p.startswith("megatron/"))
    # Merges of release branches bring in changes as one commit, so first parents are followed.
    listed = git(clone, ["rev-list", "--first-parent", "--reverse", f"{base}..{bad}", "--", *touched])
    commits = listed.decode().split()
    low, high = -1, len(commits) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_bad(Resolver(git_tree(clone, commits[middle]), cache)):
            high = middle
        else:
            low = middle
    return commits[high] if commits else ""
