"""The inventory: the checks that a cell must run. What ran and what was declared must be the same set.

A check is ``file.py::test_function`` (or ``file.py::TestClass::test_method``), relative to the suite; its
parametrised cases count together. Read from ``compat_matrix/inventory.toml``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mcore_compat import versions
from mcore_compat.errors import InventoryError
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.toml_file import DataModel, LocatedError, load_model

__all__ = ["UNDECLARED", "Check", "EvidenceRules", "Inventory", "check_of", "derive", "load_inventory", "write_text"]

_SLACK = 10
_COUNTS = ("cases", "cases_at_least", "launches_at_least")
Counter = Literal["hook_calls", "deferred_head_calls", "kernel_launches"]
Bound = Annotated[str | None, Field(pattern=r"^\d+\.\d+(\.\d+)?$")]


class Check(DataModel):
    """One declared check.

    Attributes:
        id: ``file.py::test_function``.
        since: first release that has it.
        until: first release that has it no more.
        only: run only in cells with one of these tags (a cell id is a tag, as are lane and expected mode).
        excluded: not in cells with one of these tags (``except`` in the file).
        cases: how many parametrised cases it has in every cell that runs it; None: not declared.
        cases_at_least: the same as a lower bound, for a check whose cases depend on the release.
        launches_at_least: how often the fused head runs in the check, in the suite's own process; None: not declared. A
            case that tries fewer examples shows here and not in the number of cases.
    """

    id: Annotated[str, Field(pattern=r"^[\w/.-]+\.py(::\w+)+$")]
    since: Bound = None
    until: Bound = None
    only: tuple[str, ...] = Field(default=(), strict=False)
    excluded: tuple[str, ...] = Field(default=(), strict=False, alias="except")
    cases: Annotated[int | None, Field(ge=1)] = None
    cases_at_least: Annotated[int | None, Field(ge=1)] = None
    launches_at_least: Annotated[int | None, Field(ge=1)] = None

    def applies(self, cell: Cell) -> bool:
        """Whether this cell must run it."""
        tags = cell.all_tags
        return (
            versions.within(cell.megatron_core, self.since, self.until)
            and (not self.only or bool(tags & set(self.only)))
            and not tags & set(self.excluded)
        )


class EvidenceRules(DataModel):
    """The counters that must not be zero at the end of a cell, by lane and mode.

    Attributes:
        least: the lowest count that a whole run of the suite gives, for the counters that a cell must show.
    """

    cpu: tuple[Counter, ...] = Field(default=(), strict=False)
    gpu: tuple[Counter, ...] = Field(default=("kernel_launches",), strict=False)
    hook: tuple[Counter, ...] = Field(default=("hook_calls",), strict=False)
    legacy: tuple[Counter, ...] = Field(default=("deferred_head_calls",), strict=False)
    least: Mapping[Counter, Annotated[int, Field(ge=1)]] = {}

    def required(self, cell: Cell) -> tuple[Counter, ...]:
        """What this cell must show."""
        lane = self.gpu if cell.lane == "gpu" else self.cpu
        mode = {"hook": self.hook, "legacy": self.legacy, None: ()}[cell.expected_mode]
        return tuple(dict.fromkeys((*lane, *mode)))


class Inventory(DataModel):
    """``inventory.toml``.

    Attributes:
        controls: checks that the suite also runs against a subject that is wrong on purpose, where they must fail.
    """

    schema_version: Literal[1]
    controls: tuple[str, ...] = Field(default=(), strict=False)
    evidence: EvidenceRules = EvidenceRules()
    check: tuple[Check, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _no_duplicates(self) -> Self:
        seen: set[str] = set()
        for number, check in enumerate(self.check):
            if check.id in seen:
                raise LocatedError(f"check `{check.id}` is declared twice | keep one entry", ("check", number, "id"))
            seen.add(check.id)
        return self

    @property
    def is_declared(self) -> bool:
        """Whether the project declares its checks; if not, whatever its suite collects is judged."""
        return bool(self.check)

    def declared(self, cell: Cell) -> frozenset[str]:
        """The checks that this cell must run."""
        return frozenset(check.id for check in self.check if check.applies(cell))


# A suite without an inventory: nothing is required of it by name, and no counter by mode or lane.
UNDECLARED = Inventory.model_construct(
    schema_version=1, controls=(), evidence=EvidenceRules(gpu=(), hook=(), legacy=()), check=()
)


def load_inventory(path: Path) -> Inventory:
    """Read and validate ``inventory.toml``.

    Raises:
        InventoryError: the file is missing, is not TOML, or is not a valid inventory.
    """
    return load_model(path, Inventory, InventoryError)


def check_of(node_id: str) -> str:
    """The check that a pytest node belongs to: its id without the parameters."""
    file, _, rest = node_id.partition("::")
    return f"{file}::{rest.split('[', 1)[0]}" if rest else file


def derive(
    executed: Mapping[str, Iterable[str] | Mapping[str, int]],
    cells: Iterable[Cell],
    old: Inventory | None,
    launches: Mapping[str, Mapping[str, int]] | None = None,
) -> Inventory:
    """An inventory that declares exactly what was executed.

    Args:
        executed: for each cell id that was run, the checks that ran in it, with the number of their cases if known.
        cells: the matrix's cells; those that are not in ``executed`` do not count.
        old: the inventory so far: where an entry still says what ran, it stays as it is written.
        launches: for each cell id, how often the fused head ran in each check; None: not known, so that what was
            declared stays.

    Returns:
        For a check that ran everywhere an entry without conditions, otherwise bounds where the cells are those of an
        interval of releases, and a list of cell ids where they are not. The number of cases is exact if it is the same
        in every cell, and a lower bound if it depends on the release. Launches are lower bounds: nine
        tenths of the fewest.
    """
    known = {check.id: check for check in old.check} if old else {}
    ran = {cell_id: frozenset(checks) for cell_id, checks in executed.items()}
    seen = [cell for cell in cells if cell.id in ran]
    checks = []
    for check_id in sorted(frozenset().union(*ran.values())):
        where = frozenset(cell.id for cell in seen if check_id in ran[cell.id])
        kept = known.get(check_id)
        entry = kept if kept is not None and _cells(kept, seen) == where else _entry(check_id, where, seen)
        counts = {count for checks_of in executed.values() if (count := _cases(checks_of, check_id))}
        entry = _counted(entry, counts, kept)
        least = kept.launches_at_least if kept is not None else None
        if launches is not None:
            seen_least = min(launches.get(cell_id, {}).get(check_id, 0) for cell_id in where)
            # Another version of Hypothesis may try one example more or less.
            least = (seen_least - seen_least // _SLACK) or None
        checks.append(entry.model_copy(update={"launches_at_least": least}))
    return Inventory(
        schema_version=1,
        controls=old.controls if old else (),
        evidence=old.evidence if old else EvidenceRules(),
        check=tuple(checks),
    )


def _cases(checks: Iterable[str] | Mapping[str, int], check_id: str) -> int:
    return checks.get(check_id, 0) if isinstance(checks, Mapping) else 0


def _counted(entry: Check, counts: set[int], kept: Check | None) -> Check:
    """The entry with the number of cases that was seen; if none was, with the one that was declared."""
    if not counts:
        declared = (kept.cases, kept.cases_at_least) if kept is not None else (None, None)
    elif len(counts) == 1:
        declared = (min(counts), None)
    else:
        declared = (None, min(counts))
    return entry.model_copy(update={"cases": declared[0], "cases_at_least": declared[1]})


def write_text(inventory: Inventory) -> str:
    """The inventory as the text of ``inventory.toml``."""
    lines = [
        "# The checks that every cell must run: what ran and what is declared here must be the same.",
        "# Written by `mcore-compat inventory --write` from a run; read the difference before you commit it.",
        "schema_version = 1",
        *([f"controls = {_array(inventory.controls)}"] if inventory.controls else []),
        "",
        "[evidence] # counters that must not be zero at the end of a cell",
        *(f"{name} = {_array(values)}" for name, values in inventory.evidence.model_dump(exclude={"least"}).items()),
    ]
    if inventory.evidence.least:
        lines += ["", "[evidence.least] # the lowest counts of a whole run"]
        lines += [f"{name} = {count}" for name, count in inventory.evidence.least.items()]
    for check in inventory.check:
        lines += ["", "[[check]]", f'id = "{check.id}"']
        lines += [f'{name} = "{value}"' for name in ("since", "until") if (value := getattr(check, name))]
        lines += [f"only = {_array(check.only)}"] if check.only else []
        lines += [f"except = {_array(check.excluded)}"] if check.excluded else []
        lines += [f"{name} = {count}" for name in _COUNTS if (count := getattr(check, name))]
    return "\n".join(lines) + "\n"


def _cells(check: Check, cells: Iterable[Cell]) -> frozenset[str]:
    return frozenset(cell.id for cell in cells if check.applies(cell))


_MODES: tuple[dict[str, tuple[str, ...]], ...] = (
    {},
    {"only": ("hook",)},
    {"only": ("legacy",)},
    {"except": ("backport",)},
    {"only": ("backport",)},
    {"only": ("hook", "backport")},
)


def _entry(check_id: str, where: frozenset[str], cells: list[Cell]) -> Check:
    """The simplest entry that applies exactly to ``where``."""
    releases = sorted({cell.megatron_core for cell in cells}, key=versions.sort_key)
    bounds: list[tuple[str | None, str | None]] = [(None, None)]
    bounds += [(low, None) for low in releases[1:]]
    bounds += [(None, high) for high in releases[1:]]
    bounds += [(low, high) for low, high in itertools.combinations(releases[1:], 2)]
    by_mode = [(mode, _cells(Check.model_validate({"id": check_id, **mode}), cells)) for mode in _MODES]
    for since, until in bounds:
        inside = frozenset(cell.id for cell in cells if versions.within(cell.megatron_core, since, until))
        for mode, chosen in by_mode:
            if inside & chosen == where:
                return Check.model_validate({"id": check_id, "since": since, "until": until, **mode})
    return Check.model_validate({"id": check_id, "only": tuple(sorted(where))})


def _array(values: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"
