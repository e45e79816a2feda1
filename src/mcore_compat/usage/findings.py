"""A finding about one use in one Megatron, and how bad each kind is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Severity", "UsageFinding", "worst_severity"]


class Severity(StrEnum):
    """What happens to the adopter; the worst first."""

    IMPORT = "fails at import"
    CALL = "fails when called"
    MISFIT = "no longer fits its callers"
    MOVED = "argument moved"
    PATCH_FILE = "patch file no longer applies"
    SILENT = "silent"


@dataclass(frozen=True)
class UsageFinding:
    """One finding.

    Attributes:
        severity: what happens.
        rule: short machine-readable name of the reason.
        file: of the adopter.
        line: in it.
        symbol: the upstream symbol.
        message: one sentence.
        against: label of the Megatron.
        good: newest earlier release of the comparison without this finding, "" where there is none.
        first_bad: oldest Megatron of the comparison, at or before ``against``, from which on it holds.
        commit: first bad upstream commit, short id, date and subject.
        replacement: what upstream has in its place, the likeliest first.
        upstream: ``path:line`` of the definition that was read.
        expected: reason of the declared expectation that covers it.
    """

    severity: Severity
    rule: str
    file: str
    line: int
    symbol: str
    message: str
    against: str = ""
    good: str = ""
    first_bad: str = ""
    commit: str = ""
    replacement: tuple[str, ...] = ()
    upstream: str = ""
    expected: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What identifies it across Megatrons."""
        return self.rule, self.file, self.line, self.symbol

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def worst_severity(findings: tuple[UsageFinding, ...]) -> Severity | None:
    """The worst of them, None if there are none."""
    order = list(Severity)
    return min((f.severity for f in findings), key=order.index, default=None)
