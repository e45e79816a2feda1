"""The contract: what this project depends on in one megatron-core, as plain data.

An :class:`Item` is one fact about upstream's source with the *direction* of our dependency on it. A
:class:`Contract` is all of them for one source. Both are immutable and compare by value; a snapshot is their JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from mcore_compat.errors import UsageError
from mcore_compat.files.digest import digest_of_json
from mcore_compat.matrix.toml_file import DataModel

__all__ = ["SCHEMA_VERSION", "Contract", "ContractFormatError", "Direction", "Item", "Json", "VersionLabels"]

SCHEMA_VERSION = 1

type Json = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


class ContractFormatError(UsageError):
    """A snapshot file is not one that this version of the harness can read."""


class Direction(StrEnum):
    """Who depends on whom; each direction has its own breaking rule."""

    CALL = "call"  # we call it: a removed or newly required parameter breaks us
    REPLACE = "replace"  # we stand in for it: any argument that our stand-in does not take breaks us
    CALLED_BY = "called-by"  # it calls us: a keyword that we name and it no longer hands over breaks us
    READ = "read"  # we read it: absence or another kind breaks us


@dataclass(frozen=True)
class Item:
    """One fact.

    Attributes:
        id: dotted and stable across releases, e.g. ``gpt.hook.arguments``.
        direction: of our dependency.
        value: JSON value; None where upstream does not have the thing.
        where: ``path:line`` inside the source tree, or "" where there is no one place. Not part of the comparison.
    """

    id: str
    direction: Direction
    value: Json
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # A value read from source and the same one read from a snapshot must be equal.
        object.__setattr__(self, "value", _plain(self.value))


def _plain(value: Json) -> Json:
    """The value in the containers that JSON reads back."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    return value


@dataclass(frozen=True)
class VersionLabels:
    """What a source calls itself; labels only, they decide nothing.

    Attributes:
        distribution: version in the distribution's metadata, or None where there is none.
        attribute: version that ``megatron.core.__version__`` would have without git, or None.
        commit: full commit id for a git source, or None.
    """

    distribution: str | None = None
    attribute: str | None = None
    commit: str | None = None

    @property
    def disagree(self) -> bool:
        """Whether two labels are present and differ."""
        return self.distribution is not None and self.attribute is not None and self.distribution != self.attribute

    def describe(self) -> str:
        """The labels side by side, for people."""
        parts = [f"distribution {self.distribution or 'has no metadata'}"]
        if self.attribute != self.distribution:
            parts.append(f"__version__ {self.attribute or 'not found'}")
        if self.commit:
            parts.append(f"commit {self.commit[:12]}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Contract:
    """All items of one source.

    Attributes:
        name: short label for reports: a version, a file name, a git ref.
        labels: what the source calls itself.
        items: id to item, sorted by id.
    """

    name: str
    labels: VersionLabels
    items: Mapping[str, Item]

    @classmethod
    def of(cls, name: str, labels: VersionLabels, items: Iterator[Item] | list[Item]) -> Contract:
        """Build from items in any order; two items of one id are a programming error."""
        table: dict[str, Item] = {}
        for item in items:
            assert item.id not in table, f"two items named {item.id}"
            table[item.id] = item
        return cls(name, labels, MappingProxyType(dict(sorted(table.items()))))

    def value(self, item_id: str) -> Json:
        """Value of an item, None where the contract does not have it."""
        item = self.items.get(item_id)
        return None if item is None else item.value

    def digest(self) -> str:
        """SHA-256 of the items' ids, directions and values; labels and places are left out."""
        facts = {item.id: [item.direction.value, item.value] for item in self.items.values()}
        return digest_of_json(facts)

    def to_json(self) -> str:
        """Stable text: sorted ids, one item a line, so that a snapshot's diff reads well."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "distribution": self.labels.distribution,
            "attribute": self.labels.attribute,
            "commit": self.labels.commit,
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        rows = []
        for item in self.items.values():
            row: dict[str, Any] = {"direction": item.direction.value, "value": item.value}
            if item.where:
                row["where"] = item.where
            rows.append(f"  {json.dumps(item.id)}: {json.dumps(row, sort_keys=True, ensure_ascii=False)}")
        return "\n".join(["{", *lines, ' "items": {', ",\n".join(rows), " }", "}", ""])

    @classmethod
    def from_json(cls, text: str, origin: str = "a contract snapshot") -> Contract:
        """Read a snapshot.

        Raises:
            ContractFormatError: not JSON, another schema version, or an item without its fields.
        """
        try:
            snapshot = _Snapshot.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise ContractFormatError(
                f"{origin} cannot be read: {place}: {first['msg']}.",
                "Re-create it with `mcore-compat contract snapshot`.",
            ) from error
        items = [Item(item_id, row.direction, row.value, row.where) for item_id, row in snapshot.items.items()]
        labels = VersionLabels(snapshot.distribution, snapshot.attribute, snapshot.commit)
        return cls.of(snapshot.name, labels, items)


class _Row(DataModel):
    """One item of a snapshot."""

    direction: Direction
    value: JsonValue
    where: str = ""


class _Snapshot(DataModel):
    """A snapshot's file."""

    schema_version: Literal[1]
    name: str
    distribution: str | None
    attribute: str | None
    commit: str | None
    items: dict[str, _Row]
