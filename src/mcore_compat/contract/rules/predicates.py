"""What a rule can test. Pure functions, named in the rule files.

A *state* predicate looks at one value and gives its violations, each with a short detail; a *change* predicate
looks at two values. Details are words for people and keys for pairing findings, so they must be stable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from mcore_compat.contract.model import Json

__all__ = ["CHANGES", "STATES", "Arguments", "parameters_of", "shown"]

type Arguments = Mapping[str, Any]


def shown(value: Json) -> str:
    """A value in a sentence, shortened."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items())
    elif isinstance(value, Sequence):
        text = ", ".join(shown(inner) for inner in value)
    else:
        text = "nothing" if value is None else str(value)
    return text if len(text) <= 160 else f"{text[:150]}… ({len(text)} characters)"


def parameters_of(signature: Json) -> dict[str, bool]:
    """Parameter names of a compact signature, each with whether it must be given; ``self`` left out."""
    found: dict[str, bool] = {}
    for part in signature if isinstance(signature, Sequence) and not isinstance(signature, str) else ():
        name, default, _ = str(part).partition("=")
        if name not in {"self", "*", "/"} and not name.startswith("*"):
            found[name] = not default
    return found


def _signature(value: Json) -> Json:
    """A symbol's signature where the value describes a symbol, else the value."""
    return value.get("signature") if isinstance(value, Mapping) else value


def _takes_any(signature: Json) -> bool:
    return isinstance(signature, Sequence) and any(str(part).startswith("**") for part in signature)


def _strings(value: Json) -> Iterator[str]:
    """All strings inside lists and the values of dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _absent(value: Json, _: Arguments) -> Iterator[str]:
    if value is None:
        yield ""


def _is(value: Json, arguments: Arguments) -> Iterator[str]:
    if value is not None and any(value == bad for bad in arguments["values"]):
        yield shown(value)


def _is_not(value: Json, arguments: Arguments) -> Iterator[str]:
    if value is not None and all(value != good for good in arguments["values"]):
        yield shown(value)


def _matches(value: Json, arguments: Arguments) -> Iterator[str]:
    if isinstance(value, str) and re.search(arguments["pattern"], value):
        yield value


def _lacks(value: Json, arguments: Arguments) -> Iterator[str]:
    """Names that a mapping or a list of (compact) names does not have."""
    if value is None:
        return
    keys = set(value) if isinstance(value, Mapping) else {str(part).partition("=")[0] for part in value}  # type: ignore[union-attr]
    yield from (name for name in arguments["names"] if name not in keys)


def _refuses(value: Json, arguments: Arguments) -> Iterator[str]:
    """Keywords that a signature does not take."""
    signature = _signature(value)
    if signature is None or _takes_any(signature):
        return
    known = parameters_of(signature)
    yield from (name for name in arguments["names"] if name not in known)


def _requires(value: Json, arguments: Arguments) -> Iterator[str]:
    """Required parameters beyond those we give."""
    given = set(arguments["given"])
    yield from (name for name, required in parameters_of(_signature(value)).items() if required and name not in given)


def _false(value: Json, arguments: Arguments) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (name for name in arguments["names"] if not value.get(name))


def _other_values(value: Json, arguments: Arguments) -> Iterator[str]:
    """Keys of a mapping whose value is not one of those known."""
    if isinstance(value, Mapping):
        for key, known in arguments["known"].items():
            if key in value and value[key] not in known:
                yield f"{key} = {shown(value[key])}"


def _unknown_keys(value: Json, arguments: Arguments) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (key for key in value if key not in arguments["known"])


def _unknown_entries(value: Json, arguments: Arguments) -> Iterator[str]:
    """Entries (strings anywhere inside) that match none of the known patterns."""
    patterns = [re.compile(pattern) for pattern in arguments["known"]]
    yield from (entry for entry in _strings(value) if not any(pattern.fullmatch(entry) for pattern in patterns))


def _no_entry(value: Json, arguments: Arguments) -> Iterator[str]:
    if value is not None and not any(re.fullmatch(arguments["pattern"], entry) for entry in _strings(value)):
        yield ""


def _out_of_order(value: Json, arguments: Arguments) -> Iterator[str]:
    """Pairs of events that stand in the other order; events that do not occur are not judged."""
    order = [str(entry) for entry in value] if isinstance(value, Sequence) and not isinstance(value, str) else []
    for first, second in arguments["pairs"]:
        if first in order and second in order and order.index(first) > order.index(second):
            yield f"{second} before {first}"


def _excludes_python(value: Json, arguments: Arguments) -> Iterator[str]:
    if isinstance(value, str):
        try:
            fits = SpecifierSet(value).contains(arguments["python"])
        except InvalidSpecifier:
            fits = False
        if not fits:
            yield value


def _present(value: Json, _: Arguments) -> Iterator[str]:
    if value is not None:
        yield ""


def _changed(old: Json, new: Json, _: Arguments) -> Iterator[str]:
    if old is not None and new is not None and old != new:
        yield f"{shown(old)} → {shown(new)}"


def _differs(old: Json, new: Json, _: Arguments) -> Iterator[str]:
    """As ``changed``, but also where one side does not have it."""
    if old != new:
        yield f"{shown(old)} → {shown(new)}"


def _added(old: Json, new: Json, arguments: Arguments) -> Iterator[str]:
    """Names that a signature, list or mapping gained."""
    if old is not None and new is not None:
        yield from (name for name in _names(new) if name not in _names(old) and name not in arguments.get("except", ()))


def _removed(old: Json, new: Json, arguments: Arguments) -> Iterator[str]:
    """Names that a signature, list or mapping lost."""
    yield from _added(new, old, arguments)


def _names(value: Json) -> list[str]:
    signature = _signature(value)
    if isinstance(signature, Sequence) and not isinstance(signature, str):
        return [str(part).partition("=")[0] for part in signature if str(part) not in {"self", "*", "/"}]
    return list(value) if isinstance(value, Mapping) else []


STATES: Mapping[str, Callable[[Json, Arguments], Iterator[str]]] = {
    "absent": _absent,
    "excludes-python": _excludes_python,
    "false": _false,
    "is": _is,
    "is-not": _is_not,
    "lacks": _lacks,
    "matches": _matches,
    "no-entry": _no_entry,
    "other-values": _other_values,
    "out-of-order": _out_of_order,
    "present": _present,
    "refuses": _refuses,
    "requires": _requires,
    "unknown-entries": _unknown_entries,
    "unknown-keys": _unknown_keys,
}
CHANGES: Mapping[str, Callable[[Json, Json, Arguments], Iterator[str]]] = {
    "added": _added,
    "changed": _changed,
    "differs": _differs,
    "removed": _removed,
}
