"""What is looked for: a rule's finding, a changed contract item, or any finding of a level. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mcore_compat.bisect.search import NotBisectableError
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import Finding, FindingState, check_contract, compare_contracts, level_of
from mcore_compat.contract.rules.rule import LEVELS, Rule

__all__ = ["Question", "answer", "question_for"]


@dataclass(frozen=True)
class Question:
    """Asked of every contract between good and bad.

    Attributes:
        kind: ``item``: does this item read otherwise than in the good one; ``rule``: is there a finding of this rule;
            ``level``: is there something new of at least this level, compared with the good one; ``check``: answered by
            running it, the contract only explains.
        name: the item's, rule's or check's id, or the level.
    """

    kind: Literal["item", "rule", "level", "check"]
    name: str

    def describe(self) -> str:
        """In words."""
        return {
            "item": f"contract item {self.name} changes",
            "rule": f"rule {self.name} begins or ceases to apply",
            "level": f"a finding of level {self.name} is new",
            "check": f"check {self.name} fails when it is run",
        }[self.kind]


def question_for(
    rules: Iterable[Rule], good: Contract, bad: Contract, *, item: str | None = None, rule: str | None = None
) -> Question:
    """The question of a call; without item or rule, the worst that is new between the two ends.

    Raises:
        NotBisectableError: the name is unknown, or nothing is new.
    """
    rules = tuple(rules)
    if item is not None:
        if item not in good.items.keys() | bad.items.keys():
            near = ", ".join(sorted(i for i in bad.items if i.startswith(item.partition(".")[0]))[:6])
            raise NotBisectableError(f"There is no contract item {item!r}.", f"Similar: {near or 'none'}.")
        return Question("item", item)
    if rule is not None:
        if rule not in {known.id for known in rules}:
            raise NotBisectableError(f"There is no rule {rule!r}.", "See compat_matrix/rules/.")
        return Question("rule", rule)
    level = level_of(compare_contracts(good, bad, rules))
    if level is None:
        raise NotBisectableError(
            f"Nothing that affects mcore_fused is new between {good.name} and {bad.name}.",
            "Swap the ends to find what was fixed, or name an --item.",
        )
    return Question("level", level)


def answer(question: Question, rules: Iterable[Rule], good: Contract, asked: Contract) -> bool:
    """Whether ``asked`` is on the far side of the change."""
    if question.kind == "item":
        return asked.value(question.name) != good.value(question.name)
    if question.kind == "rule":
        return _applies(question.name, rules, asked) != _applies(question.name, rules, good)
    found = compare_contracts(good, asked, rules)
    levels = LEVELS[: [*LEVELS].index(question.name) + 1]  # type: ignore[arg-type]
    return any(f.state is FindingState.NEW and f.level in levels for f in found)


def _applies(rule: str, rules: Iterable[Rule], contract: Contract) -> bool:
    chosen = [known for known in rules if known.id == rule]
    return bool(check_contract(contract, chosen))


def explained(question: Question, rules: Iterable[Rule], before: Contract, after: Contract) -> tuple[Finding, ...]:
    """Findings between the last good and the first bad one that have to do with the question, worst first."""
    found = [f for f in compare_contracts(before, after, rules) if f.state is not FindingState.SAME]
    if question.kind == "item":
        return tuple(f for f in found if f.item == question.name or f.item.startswith(f"{question.name}."))
    if question.kind == "rule":
        return tuple(f for f in found if f.rule.id == question.name)
    if question.kind == "check":  # any of them may be why it fails; what cannot concern a mode is not
        return tuple(f for f in found if f.state is FindingState.NEW and f.level != "info")
    return tuple(f for f in found if f.state is FindingState.NEW)
