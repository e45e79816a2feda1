"""The judgement: a pure function of two contracts and the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mcore_compat.contract.model import Contract, Item, Json
from mcore_compat.contract.rules.predicates import CHANGES, STATES
from mcore_compat.contract.rules.rule import LEVELS, Level, Rule
from mcore_compat.results import AnyFinding

__all__ = ["Finding", "FindingState", "check_contract", "compare_contracts", "expected_modes", "level_of"]


class FindingState(StrEnum):
    """Where a finding stands between baseline and candidate."""

    NEW = "new"
    FIXED = "fixed"
    SAME = "same"


@dataclass(frozen=True)
class Finding(AnyFinding):
    """One rule that one item of a contract meets.

    Attributes:
        rule: the rule.
        item: id of the item.
        detail: what exactly, or "" where the rule says it all.
        state: new in the candidate, fixed in it, or on both sides.
        old: the item's value in the baseline; None where there is none.
        new: the item's value in the candidate.
        where: ``path:line`` in the tree that has the finding, "" where unknown.
    """

    rule: Rule = field(repr=False)
    item: str
    detail: str
    state: FindingState
    old: Json = field(repr=False)
    new: Json = field(repr=False)
    where: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two findings the same one."""
        return (self.rule.id, self.item, self.detail)

    @property
    def level(self) -> Level:
        """The rule's level."""
        return self.rule.level

    @property
    def weight(self) -> Level:
        """The rule's level."""
        return self.rule.level

    @property
    def text(self) -> str:
        """What was found, in words."""
        return self.rule.meaning.replace("{detail}", self.detail).replace("{item}", self.item)


def _value(item: Item | None, at: str | None) -> Json:
    if item is None:
        return None
    if at is None:
        return item.value
    return item.value.get(at) if isinstance(item.value, Mapping) else None


def _violations(rule: Rule, item: Item | None) -> dict[str, None]:
    return dict.fromkeys(STATES[rule.check](_value(item, rule.at), rule.arguments))


def _state_findings(rule: Rule, item_id: str, old: Item | None, new: Item | None, paired: bool) -> list[Finding]:
    before = _violations(rule, old) if paired else {}
    after = _violations(rule, new)
    old_value, new_value = (old.value if old else None), (new.value if new else None)
    found = []
    for detail in [*after, *(gone for gone in before if gone not in after)]:
        state = FindingState.SAME if detail in before and detail in after else FindingState.NEW
        side = new
        if detail not in after:
            state, side = FindingState.FIXED, old
        found.append(Finding(rule, item_id, detail, state, old_value, new_value, side.where if side else ""))
    return found


def _change_findings(rule: Rule, item_id: str, old: Item | None, new: Item | None) -> list[Finding]:
    details = CHANGES[rule.check](_value(old, rule.at), _value(new, rule.at), rule.arguments)
    where = next((side.where for side in (new, old) if side is not None and side.where), "")
    return [
        Finding(rule, item_id, detail, FindingState.NEW, old.value if old else None, new.value if new else None, where)
        for detail in details
    ]


def _item_ids(rule: Rule, *contracts: Contract) -> list[str]:
    """Items the rule looks at; ids without a pattern count even where a contract lacks them."""
    listed = {item_id for contract in contracts for item_id in contract.items if rule.concerns(item_id)}
    return sorted(listed | {item_id for item_id in rule.items if "*" not in item_id})


def compare_contracts(baseline: Contract, candidate: Contract, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """Everything that the rules say about going from baseline to candidate, worst first.

    A model class that one side does not have at all is judged by its own rule only, not once for each of its items.
    """
    found: list[Finding] = []
    for rule in rules:
        for item_id in _item_ids(rule, baseline, candidate):
            old, new = baseline.items.get(item_id), candidate.items.get(item_id)
            if rule.is_change:
                found += _change_findings(rule, item_id, old, new)
            else:
                found += _state_findings(rule, item_id, old, new, paired=True)
    return _sorted(found)


def check_contract(candidate: Contract, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """What the rules say about one contract on its own; rules about changes say nothing."""
    found: list[Finding] = []
    for rule in rules:
        if not rule.is_change:
            for item_id in _item_ids(rule, candidate):
                found += _state_findings(rule, item_id, None, candidate.items.get(item_id), paired=False)
    return _sorted(found)


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    states = list(FindingState)
    return tuple(sorted(findings, key=lambda f: (states.index(f.state), LEVELS.index(f.level), *f.key)))


def level_of(findings: Iterable[Finding]) -> Level | None:
    """Worst level among new findings, None where nothing new was found."""
    levels = {finding.level for finding in findings if finding.state is FindingState.NEW}
    return next((level for level in LEVELS if level in levels), None)


def expected_modes(contract: Contract) -> dict[str, str | None]:
    """Mode in which each model class would be served: ``hook``, ``legacy`` or None, by the contract alone."""
    modes: dict[str, str | None] = {}
    for item_id, item in contract.items.items():
        prefix, _, rest = item_id.partition(".")
        if rest == "class" and prefix in {"gpt", "hybrid", "mamba"} and item.value is not None:
            reachable = contract.value(f"{prefix}.head") in {"forward", "_postprocess"}
            callee = contract.value(f"{prefix}.head.call")
            stock = isinstance(callee, Mapping) and callee.get("callee") == "self.output_layer"
            promised = str(contract.value(f"{prefix}.hook"))
            hook = promised == "called" or promised.startswith("handed to ")
            # Either mode needs the layer itself: with another head both are refused at patch time.
            modes[prefix] = ("hook" if hook else "legacy") if reachable and stock else None
    return modes
