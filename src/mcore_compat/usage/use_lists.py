"""Use lists: what public downstreams use, as committed facts (symbol, kind, file, line, guards), never their code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.matrix.toml_file import DataModel, load_model
from mcore_compat.usage.extract import Extracted
from mcore_compat.usage.model import Arguments, Guard, GuardKind, Parameter, Signature, Use, UseKind

__all__ = [
    "Downstream",
    "DownstreamsFile",
    "UseList",
    "UseListError",
    "load_sources",
    "load_use_lists",
    "save_use_list",
]

_SCHEMA = 1
_SOURCES = "sources.toml"
_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(Use) if field.name not in {"symbol", "kind", "file", "line"}
}


class UseListError(UsageError):
    """A use list or the list of downstreams is missing or damaged."""


class Downstream(DataModel):
    """Where a downstream's source comes from.

    Attributes:
        repository: ``owner/name`` on GitHub.
        include: folders that hold what its users run.
        pin: the Megatron that it says it is written for: a release, or a commit of Megatron-LM.
        note: where the pin is stated.
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    repository: str
    include: tuple[str, ...] = Field(strict=False)
    pin: str
    note: str = ""


class DownstreamsFile(DataModel):
    """``sources.toml``."""

    schema_version: Literal[1]
    downstream: tuple[Downstream, ...] = Field(strict=False)


@dataclass(frozen=True)
class UseList:
    """Uses of one downstream, with the version that they were read from and the Megatron that it is written for."""

    extracted: Extracted
    pin: str = ""

    @property
    def name(self) -> str:
        """Of the downstream."""
        return self.extracted.name


def load_sources(folder: Path) -> tuple[Downstream, ...]:
    """The downstreams whose lists are kept in a folder.

    Raises:
        UseListError: ``sources.toml`` is missing or is not such a list.
    """
    return load_model(folder / _SOURCES, DownstreamsFile, UseListError).downstream


def save_use_list(folder: Path, uses: UseList) -> Path:
    """Write one list, one use a line, so that a refresh shows as a readable difference."""
    files = sorted({use.file for use in uses.extracted.uses})
    guards = sorted({guard for use in uses.extracted.uses for guard in use.guards}, key=repr)
    rows = ",\n".join(f"  {json.dumps(_row(use, files, guards), separators=(',', ':'))}" for use in uses.extracted.uses)
    head = {
        "schema_version": _SCHEMA,
        "name": uses.name,
        "version": uses.extracted.version,
        "pin": uses.pin,
        "files_read": uses.extracted.files,
        "unread": uses.extracted.unread,
        "files": files,
        "guards": [[g.kind.value, list(g.symbols), g.operator, g.text] for g in guards],
    }
    text = json.dumps(head, indent=1).removesuffix("\n}")
    path = folder / f"{uses.name}.json"
    write_atomically(path, f'{text},\n "uses": [\n{rows}\n ]\n}}\n')
    return path


def _row(use: Use, files: list[str], guards: list[Guard]) -> list[Any]:
    more: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(use, name)
        if value in (default, ()):
            continue
        if name == "guards":
            value = [guards.index(guard) for guard in use.guards]
        elif name == "arguments":
            value = {key: inner for key, inner in asdict(use.arguments).items() if inner} if use.arguments else None
        elif name == "signature":
            value = [[p.name, p.kind, int(p.required)] for p in use.signature or ()]
        elif name == "root" and use.symbol == value:
            value = 1
        more[name] = value
    return [use.symbol, use.kind.value, files.index(use.file), use.line, *([more] if more else [])]


def load_use_lists(folder: Path, names: Iterable[str] = ()) -> tuple[UseList, ...]:
    """The lists of a folder, in the order of their names.

    Raises:
        UseListError: there is none, or one is damaged.
    """
    wanted = set(names)
    paths = [path for path in sorted(folder.glob("*.json")) if not wanted or path.stem in wanted]
    if not paths or (missing := wanted - {path.stem for path in paths}):
        named = ", ".join(sorted(missing)) if paths else "any downstream"
        raise UseListError(
            f"There is no use list of {named} here.", "see `mcore-compat downstreams` for those there are."
        )
    return tuple(_load(path) for path in paths)


def _load(path: Path) -> UseList:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] != _SCHEMA:
            raise UseListError(f"{path.name} has another format.", "refresh it with `mcore-compat downstreams`.")
        guards = [Guard(GuardKind(k), tuple(s), o, t) for k, s, o, t in data["guards"]]
        uses = tuple(_use(row, data["files"], guards) for row in data["uses"])
        extracted = Extracted(data["name"], data["version"], uses, tuple(data["unread"]), data["files_read"])
        return UseList(extracted, data["pin"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UseListError(
            f"{path.name} is not a use list ({error}).", "refresh it with `mcore-compat downstreams`."
        ) from error


def _use(row: list[Any], files: list[str], guards: list[Guard]) -> Use:
    symbol, kind, file, line = row[:4]
    more: dict[str, Any] = dict(row[4]) if len(row) > 4 else {}
    if more.get("root") == 1:
        more["root"] = symbol
    if "guards" in more:
        more["guards"] = tuple(guards[index] for index in more["guards"])
    if "alternatives" in more:
        more["alternatives"] = tuple(more["alternatives"])
    if "arguments" in more:
        given = dict(more["arguments"] or {})
        more["arguments"] = Arguments(**{**given, "keywords": tuple(given.get("keywords", ()))})
    if "signature" in more:
        more["signature"] = Signature(tuple(Parameter(n, k, bool(r)) for n, k, r in more["signature"]))
    return Use(symbol, UseKind(kind), files[file], line, **more)
