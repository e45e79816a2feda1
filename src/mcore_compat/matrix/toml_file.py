"""Reads the TOML files of ``compat_matrix/`` into strict models, and says in one sentence what is wrong with one.

The messages name file, line, key and what is allowed. ``tomllib`` keeps no positions, so the line of a key is found by
walking the text's table headers; where a key cannot be found the line of its table is named instead.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.errors import InfrastructureError, UsageError

__all__ = ["DataModel", "LocatedError", "line_of", "load_model", "schema_text", "stale_schemas"]

_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\-\"]+)\s*\]\]?")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"]+)\s*=")


class DataModel(BaseModel):
    """Base of everything read from a data file: frozen, strict, no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LocatedError(ValueError):
    """Raised inside a validator of a whole file: the problem, and where in the file it is.

    The message has the form ``problem | next step``.
    """

    def __init__(self, message: str, location: tuple[int | str, ...]) -> None:
        self.location = location
        super().__init__(message)


def line_of(text: str, location: tuple[int | str, ...]) -> int | None:
    """1-based line of the value at ``location`` (a pydantic error location) in a TOML text, or None.

    A key that is missing from its table gives the line of the table's header.
    """
    table: list[str] = []
    wanted = [part for part in location if isinstance(part, str)]
    indices = [part for part in location if isinstance(part, int)]
    index = indices[0] if indices else 0
    counts: dict[str, int] = {}
    best: tuple[int, int] | None = None
    inside = True
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        if header and line.strip().startswith("["):
            name = header.group(2).replace('"', "")
            table = name.split(".")
            if header.group(1) == "[[":
                counts[name] = counts.get(name, -1) + 1
            inside = wanted[: len(table)] == table and (header.group(1) == "[" or counts[name] == index)
            if inside and (best is None or len(table) > best[0]):
                best = (len(table), number)
            continue
        key = _KEY.match(line)
        if not key or not inside:
            continue
        path = [*table, key.group(1).strip('"')]
        if wanted[: len(path)] == path and (best is None or len(path) > best[0]):
            best = (len(path), number)
    return best[1] if best else None


def load_model[Model: DataModel](path: Path, model: type[Model], error: type[UsageError]) -> Model:
    """Read ``path`` as ``model``.

    Raises:
        UsageError: (as the given subclass) the file is missing, is not TOML, or breaks the model; one message names
            the file, the line, the key and what is allowed.
    """
    text = _read(path, error)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise error(f"{path.name} is not valid TOML: {exc}.", "Correct the line named.") from exc
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        problem, next_step = _explain(path.name, text, exc)
        raise error(problem, next_step) from exc


def schema_text(model: type[BaseModel]) -> str:
    """The model's JSON Schema, as it is committed beside the data."""
    schema: dict[str, Any] = model.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def stale_schemas(expected: dict[Path, str]) -> tuple[Path, ...]:
    """Those of the committed schemas that differ from what the models say now."""
    return tuple(
        path for path, text in expected.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    )


def _read(path: Path, error: type[UsageError]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise error(
            f"{path.name} is missing from {path.parent.name}/.",
            "Run inside a checkout of the project, or name one with --root.",
        ) from exc
    except UnicodeDecodeError as exc:
        raise error(f"{path.name} is not UTF-8 text (byte {exc.start}).", "Save it as UTF-8.") from exc
    except OSError as exc:
        raise InfrastructureError(f"{path.name} cannot be read: {exc.strerror}.", "Make it readable.") from exc


def _explain(name: str, text: str, exc: ValidationError) -> tuple[str, str]:
    """One problem and next step out of pydantic's list: the first in full, the others counted."""
    errors = exc.errors(include_url=False)
    first = errors[0]
    location = tuple(first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, LocatedError):
        location = cause.location
    line = line_of(text, location)
    where = f"{name}, line {line}" if line else name
    key = ".".join(str(part) for part in location) or "the whole file"
    kind = first["type"]
    if kind == "extra_forbidden":
        what, allowed = f"unknown key `{key}`", "remove it; the schema beside the file lists the keys"
    elif kind == "missing":
        what, allowed = f"missing key `{key}`", "add it"
    elif kind in {"value_error", "assertion_error"}:
        # Our own validators write problem and remedy themselves, separated by a bar.
        message = first["msg"].removeprefix("Value error, ")
        body, _, remedy = message.partition(" | ")
        what, allowed = (f"`{key}`: {body}" if location else body), remedy or "correct it"
    else:
        what, allowed = f"`{key}` is {first['input']!r}", first["msg"][0].lower() + first["msg"][1:]
    more = f" ({len(errors) - 1} more of the kind follow.)" if len(errors) > 1 else ""
    return f"{where}: {what}.", f"{allowed[0].upper()}{allowed[1:]}.{more}"
