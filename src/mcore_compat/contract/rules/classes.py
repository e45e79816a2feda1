"""Equivalence classes of releases: one cell of a class stands for all of it in a pull request.

Two releases are of one class when everything that we replace or are called by, and that a rule above a note looks
at, reads the same in both: those are the places where a patch can break although every call still works. What we
only call or read is left to the newest release of the class, and all releases run nightly. Classes are computed,
never written down.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mcore_compat.contract.model import Contract, Direction
from mcore_compat.contract.rules.rule import Rule
from mcore_compat.contract.snapshots import sorted_names

__all__ = ["ReleaseClass", "class_names", "equivalence_classes"]

_BINDING = {Direction.REPLACE, Direction.CALLED_BY}


@dataclass(frozen=True)
class ReleaseClass:
    """Releases with the same binding surface.

    Attributes:
        digest: of that surface.
        members: versions, oldest first; the last one represents the class.
    """

    digest: str
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        """First and last member's minor version, e.g. ``0.16`` or ``0.13-0.15``."""
        ends = [".".join(member.split(".")[:2]) for member in (self.members[0], self.members[-1])]
        return ends[0] if ends[0] == ends[1] else "-".join(ends)

    @property
    def representative(self) -> str:
        """The newest member."""
        return self.members[-1]


def _digest(contract: Contract, rules: Iterable[Rule]) -> str:
    binding = [rule for rule in rules if rule.way in _BINDING and rule.level != "info"]
    facts = {
        item.id: item.value
        for item in contract.items.values()
        if item.value is not None and any(rule.concerns(item.id) for rule in binding)
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def equivalence_classes(contracts: Mapping[str, Contract], rules: Iterable[Rule]) -> tuple[ReleaseClass, ...]:
    """Group releases by binding surface, oldest class first.

    Args:
        contracts: by version.
        rules: they say which items are binding.
    """
    rules = tuple(rules)
    groups: dict[str, list[str]] = {}
    for name in sorted_names(contracts):
        groups.setdefault(_digest(contracts[name], rules), []).append(name)
    return tuple(ReleaseClass(digest, tuple(members)) for digest, members in groups.items())


def class_names(contracts: Mapping[str, Contract], rules: Iterable[Rule]) -> dict[str, str]:
    """Class name by version, for planning: equal names, one cell."""
    found = equivalence_classes(contracts, rules)
    names = [group.name for group in found]
    return {
        member: group.name if names.count(group.name) == 1 else f"{group.name} ({group.digest[:6]})"
        for group in found
        for member in group.members
    }
