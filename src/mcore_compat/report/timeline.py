"""How the surface moved from release to release, for the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.classes import class_names
from mcore_compat.contract.rules.compare import FindingState, compare_contracts, expected_modes, level_of
from mcore_compat.contract.rules.rule import Rule

__all__ = ["Event", "Transition", "timeline"]


@dataclass(frozen=True)
class Event:
    """One thing that came or went with a release."""

    state: str
    level: str
    rule: str
    message: str
    where: str
    link: str


@dataclass(frozen=True)
class Transition:
    """One release, against the one before.

    Attributes:
        version: the release.
        before: the release before, None for the first.
        level: worst of what is new: ``break``, ``drift``, ``info`` or None.
        modes: model class to mode, in words.
        contract_class: computed class of the release.
        events: what moved.
    """

    version: str
    before: str | None
    level: str | None
    modes: str
    contract_class: str
    events: tuple[Event, ...]


def timeline(contracts: Mapping[str, Contract], rules: Iterable[Rule]) -> tuple[Transition, ...]:
    """Transitions in the order of ``contracts``, which is oldest first."""
    rules = tuple(rules)
    names = class_names(contracts, rules)
    found = []
    for before, version in pairwise([None, *contracts]):
        assert version is not None
        new = contracts[version]
        findings = compare_contracts(contracts[before], new, rules) if before is not None else ()
        events = tuple(
            Event(f.state.value, f.level, f.rule.id, f.text, f.where, f.rule.link)
            for f in findings
            if f.state is not FindingState.SAME
        )
        modes = ", ".join(f"{model} {mode or 'not served'}" for model, mode in expected_modes(new).items())
        found.append(Transition(version, before, level_of(findings), modes, names[version], events))
    return tuple(found)
