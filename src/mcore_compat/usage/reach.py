"""Whether the guards around a use let it be reached with one Megatron, and whether a handler catches its failure."""

from __future__ import annotations

from mcore_compat.usage.guards import version_holds
from mcore_compat.usage.model import Guard, GuardKind, Use
from mcore_compat.usage.resolve import Resolver, State
from mcore_compat.usage.signatures import signatures_of

__all__ = ["caught", "megatron_version", "reached"]

_EVERYTHING = frozenset({"Exception", "BaseException"})


def megatron_version(resolver: Resolver) -> str | None:
    """The version that the tree itself states."""
    summary = resolver.summary("megatron.core.package_info")
    if summary is None or "names" not in summary:
        return None
    parts = []
    for name in ("MAJOR", "MINOR", "PATCH"):
        bindings = summary["names"].get(name)
        if not bindings or not str(bindings[-1][2]).startswith(":"):
            return None
        parts.append(bindings[-1][2][1:])
    return ".".join(parts)


def reached(use: Use, resolver: Resolver, version: str | None) -> bool:
    """False if some guard is known, or meant, to keep the use from running with this Megatron."""
    return all(_open(guard, use, resolver, version) for guard in use.guards)


def _open(guard: Guard, use: Use, resolver: Resolver, version: str | None) -> bool:
    match guard.kind:
        case GuardKind.TYPING | GuardKind.UNKNOWN:
            return False
        case GuardKind.VERSION:
            return version_holds(guard, version) is not False
        case GuardKind.PRESENT:
            return use.symbol in guard.symbols or all(_state(resolver, s) is not State.MISSING for s in guard.symbols)
        case GuardKind.ABSENT:
            return not guard.symbols or any(_state(resolver, s) is not State.PRESENT for s in guard.symbols)
        case GuardKind.HANDLER:
            return any(_state(resolver, symbol) is State.MISSING for symbol in guard.symbols)
        case GuardKind.SIGNATURE:
            return _takes(resolver, guard.symbols[0], guard.text)
    return True


def _state(resolver: Resolver, symbol: str) -> State:
    return resolver.resolve(symbol).state


def _takes(resolver: Resolver, symbol: str, parameter: str) -> bool:
    """Whether a function has a parameter; yes if its signature is not known."""
    for target in resolver.resolve(symbol).targets:
        found = signatures_of(resolver, target, bound=False)
        if found is not None and not any(parameter in {p.name for p in signature} for signature in found):
            return False
    return True


def caught(use: Use, *exceptions: str) -> bool:
    """Whether a handler around the use catches one of these exceptions, or a test looked first."""
    for guard in use.guards:
        if guard.kind is GuardKind.PRESENT and (use.symbol in guard.symbols or not guard.symbols):
            return True
        if guard.kind is GuardKind.TRY and set(guard.text.split()) & {*exceptions, *_EVERYTHING}:
            return True
    return False
