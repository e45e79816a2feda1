"""The report: what a run knows, as data. Everything people read is rendered from it.

The JSON Schema of :class:`Report` is committed as ``compat_matrix/report.schema.json``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mcore_compat.subjects.selection import DEFAULT_SUBJECT
from mcore_compat.verdicts import Level, Verdict, level_of

__all__ = [
    "AS_DECLARED",
    "FAILED_CHECK",
    "SCHEMA_VERSION",
    "AnyFinding",
    "CellResult",
    "CheckCounts",
    "CheckResult",
    "Evidence",
    "Finding",
    "MegatronCore",
    "Report",
    "Seconds",
    "SubjectInfo",
    "signature",
]

SCHEMA_VERSION: Literal[1] = 1
# What differs between two runs of the same failure: numbers, addresses, object ids, paths.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?(e[+-]?\d+)?|/[\w./-]+")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)
_MAX_SIGNATURE = 300


def signature(message: str) -> str:
    """What a failure says, without what differs between two runs of it.

    This is its first line; a message that quotes the traceback of another process has that exception's line as well.
    """
    text = message.strip()
    first, _, rest = text.partition("\n")
    exceptions = _EXCEPTION.findall(rest) if _TRACEBACK in text else []
    return _VARIABLE.sub("#", " | ".join([first, *exceptions[-1:]]))[:_MAX_SIGNATURE]


class AnyFinding(ABC):
    """What every finding has, whether it was read from source, seen in a cell, or is a difference of two cells."""

    @property
    @abstractmethod
    def weight(self) -> Level:
        """How much it counts."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What was found; the first line stands alone."""

    @property
    def headline(self) -> str:
        """First line of the text."""
        return self.text.strip().partition("\n")[0]

    @property
    def signature(self) -> str:
        """Equal for two findings of one cause."""
        return signature(self.text)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MegatronCore(_Record):
    """Which megatron-core was judged: asked for, installed, and said by itself.

    Attributes:
        origin: of ``megatron.core``, relative to the environment.
        sha256: over the installed files' own hashes.
    """

    requested: str
    distribution: str | None = None
    attribute: str | None = None
    origin: str | None = None
    sha256: str | None = None


class CheckCounts(_Record):
    """Checks of a cell; their cases count together.

    Attributes:
        planned: declared for this cell, less those that do not apply.
        not_applicable: declared, but about something that the subject says it has not.
    """

    planned: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_applicable: int = 0


class Evidence(_Record):
    """How often the paths under test really ran."""

    hook_calls: int = 0
    deferred_head_calls: int = 0
    kernel_launches: int = 0
    unfused_fallbacks: int = 0


class Seconds(_Record):
    """Where a cell's wall time went."""

    provision: float = 0.0
    imports: float = 0.0
    suite: float = 0.0


class Finding(_Record, AnyFinding):
    """One thing that somebody has to know or do.

    Attributes:
        kind: machine-readable class of the finding.
        message: what was seen; its first line stands alone.
        check: the check concerned, if any.
        next_step: what to do.
        verdict: what it alone would make of the cell; None: it is reported and does not count against the cell.
    """

    kind: str
    message: str
    check: str | None = None
    next_step: str = ""
    verdict: Verdict | None = None
    link: str | None = None

    @property
    def weight(self) -> Level:
        """How much it counts, by its verdict."""
        return level_of(self.verdict)

    @property
    def text(self) -> str:
        """The message, or the kind if there is none."""
        return self.message or self.kind


# The kind of a finding about a check that failed.
FAILED_CHECK = "failed-check"
# The kind of a note about a check that goes as its declared exception says.
AS_DECLARED = "as-declared"


class CheckResult(_Record):
    """One check in one cell.

    Attributes:
        launches: how often the fused head ran in it, in the suite's own process.
    """

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    expected: bool = True
    cases: int = 1
    launches: int = 0
    seconds: float = 0.0
    message: str = ""


class CellResult(_Record):
    """One cell, judged.

    Attributes:
        stock: what unpatched megatron-core computed on fixed weights, by name; the gate compares both sides.
        reused_from: the run that judged it, where that was an earlier one with the same inputs.
    """

    id: str
    megatron_core: MegatronCore
    contract_class: str
    lane: str
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    numpy: str | None = None
    device: str | None = None
    mode: str | None = None
    expected_mode: str | None = None
    verdict: Verdict
    reason: str = ""
    reused_from: str | None = None
    checks: CheckCounts = CheckCounts()
    evidence: Evidence = Evidence()
    stock: dict[str, tuple[float, ...]] = {}
    seconds: Seconds = Seconds()
    findings: tuple[Finding, ...] = ()
    results: tuple[CheckResult, ...] = ()


class SubjectInfo(_Record):
    """The implementation under test, and the project that its suite comes from.

    Attributes:
        name: the project's distribution, as installed in every cell.
        version: of it.
        sha256: of its wheel.
        commit: of its checkout.
        harness: version of mcore-compat, where the project is another one.
        judged: what the suite judged: an implementation of the fused forward, or the project by its title.
        judged_version: of the published package that it is, if it is one.
        judged_sha256: of that package's wheel.
        links: texts with addresses that the project wants in every report.
    """

    name: str
    version: str
    sha256: str
    commit: str | None = None
    harness: str | None = None
    judged: str = DEFAULT_SUBJECT
    judged_version: str | None = None
    judged_sha256: str | None = None
    links: dict[str, str] = {}

    @property
    def title(self) -> str:
        """In words: what was judged, and from which version."""
        version = f"{self.name} {self.version}" + (f" at {self.commit}" if self.commit else "")
        judged = f"{self.judged} {self.judged_version}" if self.judged_version else self.judged
        by = f", judged by mcore-compat {self.harness}" if self.harness else ""
        if self.judged == self.name:
            return f"{version}{by}"
        joined = "of" if self.harness or self.judged == DEFAULT_SUBJECT else "judged by"
        return f"{judged}, {joined} {version}{by}"


class Report(_Record):
    """One run.

    Attributes:
        run_id: also the name of its folder below ``reports/``.
        started: ISO 8601, UTC.
        seconds: wall time of the whole run.
        suite: folder of the suite, relative to the checkout; "" for one elsewhere.
        planned: ids of the cells that the run was to judge; each of them is in ``cells``.
        findings: those that belong to no cell.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    started: str
    seconds: float
    verdict: Verdict
    subject: SubjectInfo
    suite_sha256: str
    suite: str = "tests/compat"
    profile: str
    planned: tuple[str, ...]
    cells: tuple[CellResult, ...]
    findings: tuple[Finding, ...] = ()
