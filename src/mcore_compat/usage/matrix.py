"""One source against many Megatrons: which is its own, what is new in each, since when, and what there is instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.extract import Extracted
from mcore_compat.usage.findings import Severity, UsageFinding, worst_severity
from mcore_compat.usage.patch_files import check_patches
from mcore_compat.usage.resolve import Resolver, State

__all__ = ["Column", "UsageReport", "assess"]

_SUGGESTIONS = 3
_ALIKE = 0.55


@dataclass(frozen=True)
class Column:
    """Findings with one Megatron."""

    label: str
    findings: tuple[UsageFinding, ...] = ()
    reference: bool = False

    @property
    def open(self) -> tuple[UsageFinding, ...]:
        """Those that no expectation covers."""
        return tuple(finding for finding in self.findings if not finding.expected)

    @property
    def severity(self) -> Severity | None:
        """The worst open one."""
        return worst_severity(self.open)


@dataclass(frozen=True)
class UsageReport:
    """The result of a check.

    Attributes:
        source: name of the adopter's source.
        version: of it.
        uses: how many uses were judged.
        symbols: how many distinct symbols.
        columns: in the order of the Megatrons.
        unread: files of the source that do not parse.
        stale: expectations that cover nothing, or have expired.
    """

    source: str
    version: str
    uses: int
    symbols: int
    columns: tuple[Column, ...]
    unread: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether there is nothing to do."""
        return not self.stale and not self.unread and not any(column.open for column in self.columns)


def assess(
    extracted: Extracted,
    sides: Sequence[Side],
    *,
    pin: str | None = None,
    patches: Iterable[tuple[str, str]] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> UsageReport:
    """Check a source with every Megatron.

    Args:
        extracted: the source's uses.
        sides: the Megatrons, oldest first.
        pin: label of the one that the source is written for; the one with the fewest findings, the newest of these,
            where None.
        patches: path and text of each patch file of the source.
        progress: called with the label of each Megatron.
    """
    patch_files = tuple(patches)
    alone: list[tuple[UsageFinding, ...]] = []
    for side in sides:
        progress(side.label)
        found = check_uses(extracted.uses, side)
        alone.append(found + check_patches(patch_files, side.resolver.tree))
    home = _home(sides, alone, pin)
    columns = []
    for index, side in enumerate(sides):
        found = alone[index]
        if index > home:
            compared = check_uses(extracted.uses, side, sides[home])
            found = compared + tuple(f for f in alone[index] if f.severity is Severity.PATCH_FILE)
        columns.append(Column(side.label, found, index == home))
    dated = _dated(columns, sides, home)
    return UsageReport(
        extracted.name, extracted.version, len(extracted.uses), len(extracted.symbols), dated, extracted.unread
    )


def _home(sides: Sequence[Side], findings: Sequence[tuple[UsageFinding, ...]], pin: str | None) -> int:
    labels = [side.label for side in sides]
    if pin in labels:
        return labels.index(pin)
    fewest = min(len(found) for found in findings)
    return max(index for index, found in enumerate(findings) if len(found) == fewest)


def _dated(columns: Sequence[Column], sides: Sequence[Side], home: int) -> tuple[Column, ...]:
    """With first bad and last good Megatron, counted from the reference outwards, and suggestions."""
    keys = [{finding.key for finding in column.findings} for column in columns]
    dated = []
    for index, column in enumerate(columns):
        findings = []
        for finding in column.findings:
            first = index
            while first > 0 and finding.key in keys[first - 1]:
                first -= 1
            good = columns[first - 1].label if first else ""
            there = sides[first - 1] if first else sides[home]
            replacement = suggestions(finding.symbol, sides[index].resolver, there.resolver) if index > home else ()
            findings.append(
                replace(
                    finding,
                    against=column.label,
                    first_bad=columns[first].label,
                    good=good,
                    replacement=replacement,
                )
            )
        dated.append(replace(column, findings=tuple(findings)))
    return tuple(dated)


def suggestions(symbol: str, now: Resolver, before: Resolver) -> tuple[str, ...]:
    """What upstream has in a missing symbol's place: the same name elsewhere, or a new name beside it."""
    if now.resolve(symbol).state is not State.MISSING:
        return ()
    owner, _, name = symbol.rpartition(".")
    holder = now.resolve(owner)
    found: list[str] = []
    if holder.state is State.PRESENT and holder.targets:
        target = holder.targets[0]
        old = before.resolve(owner).targets
        new_names = _names(now, target.module, target.name) - (
            _names(before, old[0].module, old[0].name) if old else set()
        )
        found += [f"{owner}.{other}" for other in difflib.get_close_matches(name, sorted(new_names), 2, _ALIKE)]
    package = ".".join(owner.split(".")[:2])
    found += [other for other in now.defined(name) if other.startswith(f"{package}.")]
    return tuple(dict.fromkeys(found))[:_SUGGESTIONS]


def _names(resolver: Resolver, module: str, name: str) -> set[str]:
    """Names that a module or a class of it defines."""
    summary = resolver.summary(module) or {}
    names = summary.get("names", {})
    if not name:
        return set(names)
    classes = [binding[2] for binding in names.get(name.partition(".")[0], ()) if binding[0] == "c"]
    return {member for data in classes for member in (*data["members"], *data["attributes"])}
