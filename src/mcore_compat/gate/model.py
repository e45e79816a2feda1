"""The gate's report as data; its JSON Schema is committed as ``compat_matrix/gate.schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from mcore_compat.results import AnyFinding, CellResult
from mcore_compat.subjects.selection import DEFAULT_SUBJECT
from mcore_compat.verdicts import Level, Verdict

__all__ = [
    "SCHEMA_VERSION",
    "GateFinding",
    "GateReport",
    "Lines",
    "Side",
    "SourceCheck",
    "State",
    "Tier",
    "WitnessState",
]

SCHEMA_VERSION: Literal[1] = 1
State = Literal["new", "fixed", "same", "flaky"]
WitnessState = Literal["confirmed", "refuted", "not run", "inconclusive", "none"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GateFinding(_Record, AnyFinding):
    """One difference between the two sides, or something they share.

    Attributes:
        origin: ``contract`` (read from upstream's source), ``usage`` (read from the project's own source) or ``cell``
            (seen when run).
        title: stable name: the rule's id, or the check's.
        state: new in the candidate, fixed in it, on both sides, or not the same when run again.
        witness: what running the rule's witness on both sides said; ``none`` where the finding needs none.
        where: ``path:line`` in upstream's source.
        source: ``path:line`` in the project's own source.
        consequence: by mode of mcore_fused.
        change: lines of a diff of the contract's item, from the baseline to the candidate.
        upstream: raised inside megatron-core with no frame of mcore_fused on the stack: upstream's own failure.
    """

    origin: Literal["contract", "usage", "cell"]
    title: str
    state: State
    level: Level
    message: str
    where: str | None = None
    source: str | None = None
    item: str | None = None
    link: str | None = None
    next_step: str = ""
    witness: WitnessState = "none"
    witness_note: str = ""
    consequence: dict[str, str] = {}
    change: tuple[str, ...] = ()
    upstream: bool = False

    @property
    def weight(self) -> Level:
        """The level that counts: what its own witness does not bear out is a warning, not a break."""
        return "drift" if self.level == "break" and self.witness == "refuted" else self.level

    @property
    def text(self) -> str:
        """The message."""
        return self.message


class Side(_Record):
    """Baseline or candidate.

    Attributes:
        name: as the caller named it, without absolute paths.
        nearest: release whose contract is nearest; stands in for a version wherever one is needed as a label.
        modes: mode of each model class, by the contract alone.
        note: what else is to be known of it, such as that it was yanked.
        cell: what running it gave, or None.
    """

    name: str
    kind: str
    distribution: str | None = None
    attribute: str | None = None
    commit: str | None = None
    nearest: str | None = None
    modes: dict[str, str | None] = {}
    note: str = ""
    cell: CellResult | None = None


class Tier(_Record):
    """One step of the gate."""

    name: Literal["usage", "static", "witness", "cpu", "gpu"]
    ran: bool
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """A witness: lines of Python that a cell's interpreter runs.

    Attributes:
        source: its lines, with the prelude where it wants one.
        isolated: it needs a process in which megatron was not imported yet.
        fails_with: the exception that means "fail"; any other one means that the witness itself did not work.
    """

    source: str
    isolated: bool = False
    fails_with: str = "AssertionError"


@dataclass(frozen=True)
class SourceCheck:
    """What reading the project's own source against both sides gave.

    Attributes:
        tier: the step, run or not.
        findings: of origin ``usage``.
        witnesses: of some of them, by their place in ``findings``.
    """

    tier: Tier
    findings: tuple[GateFinding, ...] = ()
    witnesses: Mapping[int, Lines] = field(default_factory=dict)


class GateReport(_Record):
    """What the gate knows."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    verdict: Verdict
    reason: str
    next_step: str
    baseline: Side
    candidate: Side
    tiers: tuple[Tier, ...]
    findings: tuple[GateFinding, ...]
    subject: dict[str, Any] = {}

    @property
    def judged(self) -> str:
        """Which implementation the cells judged."""
        return str(self.subject.get("judged", DEFAULT_SUBJECT))

    def of(self, state: State, *levels: Level) -> tuple[GateFinding, ...]:
        """Findings of a state, and of these levels where given."""
        return tuple(f for f in self.findings if f.state == state and (not levels or f.level in levels))
