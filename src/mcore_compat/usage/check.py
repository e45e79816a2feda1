"""Judges the uses of one adopter with one Megatron, and against the one that the adopter is written for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_compat.usage.compare import argument_moved, callers_misfit, ignored_argument, unpacking
from mcore_compat.usage.findings import Severity, UsageFinding
from mcore_compat.usage.model import GuardKind, Use, UseKind
from mcore_compat.usage.reach import caught, megatron_version, reached
from mcore_compat.usage.resolve import Resolution, Resolver, State
from mcore_compat.usage.signatures import call_problem

__all__ = ["Side", "check_uses"]

_IMPORTS = frozenset({UseKind.IMPORT, UseKind.STAR})
_READS = frozenset({UseKind.ATTRIBUTE, UseKind.CALL, UseKind.SUBCLASS, UseKind.SUPER})
_ARE_SET = frozenset({UseKind.PATCH, UseKind.STORE, UseKind.OVERRIDE})
_WORDS = {
    UseKind.PATCH: "the patch is never called",
    UseKind.STORE: "what is set here is never read",
    UseKind.OVERRIDE: "the override is never called",
}


@dataclass
class Side:
    """One Megatron: its resolver, label and version."""

    resolver: Resolver
    label: str
    version: str | None = None

    @classmethod
    def of(cls, resolver: Resolver, label: str | None = None) -> Side:
        """With the version that the tree states."""
        return cls(resolver, label or resolver.tree.label, megatron_version(resolver))


def check_uses(uses: Sequence[Use], side: Side, reference: Side | None = None) -> tuple[UsageFinding, ...]:
    """Findings about every use.

    Args:
        uses: of one source.
        side: the Megatron.
        reference: the older one that the source is written for. Only with it are changes told that fail nowhere by
            themselves: what a guard hides, what is set but no longer read, parameters that callers newly hand over.
    """
    rescued = _rescued(uses, side)
    found: dict[tuple[object, ...], UsageFinding] = {}
    for use in uses:
        for finding in _of_use(use, side, reference, rescued):
            found.setdefault(finding.key, finding)
    return tuple(found.values())


def _rescued(uses: Sequence[Use], side: Side) -> frozenset[str]:
    """Symbols whose failed import leads to a handler that imports something which exists."""
    return frozenset(
        symbol
        for use in uses
        if use.kind in _IMPORTS and side.resolver.resolve(use.symbol).state is State.PRESENT
        for guard in use.guards
        if guard.kind is GuardKind.HANDLER
        for symbol in guard.symbols
    )


def _of_use(use: Use, side: Side, reference: Side | None, rescued: frozenset[str]) -> Iterator[UsageFinding]:
    if not reached(use, side.resolver, side.version):
        hidden = _was_reached(use, side, reference)
        if hidden:
            yield hidden
        return
    if _behind_lost_key(use, side, reference):
        return
    symbol, resolution = _chosen(use, side.resolver)
    if resolution.state is State.MISSING:
        yield from _of_missing(use, symbol, resolution, side, reference, rescued)
    elif resolution.state is State.PRESENT:
        yield from _of_present(use, symbol, resolution, side, reference)


def _chosen(use: Use, resolver: Resolver) -> tuple[str, Resolution]:
    """The first of a name's possible symbols that exists."""
    first = resolver.resolve(use.symbol)
    if first.state is State.MISSING:
        for other in use.alternatives:
            found = resolver.resolve(other)
            if found.state is not State.MISSING:
                return other, found
    return use.symbol, first


def _finding(use: Use, severity: Severity, rule: str, symbol: str, message: str, upstream: str = "") -> UsageFinding:
    return UsageFinding(severity, rule, use.file, use.line, symbol, message, upstream=upstream)


def _was_reached(use: Use, side: Side, reference: Side | None) -> UsageFinding | None:
    """A use behind ``hasattr`` that the reference reached and this Megatron does not."""
    tests = [g for g in use.guards if g.kind is GuardKind.PRESENT]
    if reference is None or not tests or not reached(use, reference.resolver, reference.version):
        return None
    gone = [s for g in tests for s in g.symbols if side.resolver.resolve(s).state is State.MISSING]
    if not gone or not _existed(gone[0], reference) or use.kind is UseKind.STORE:
        return None
    message = f"{_short(gone[0])} is gone, so the test for it skips this use."
    return _finding(use, Severity.SILENT, "hidden-by-guard", gone[0], message)


def _behind_lost_key(use: Use, side: Side, reference: Side | None) -> bool:
    """Whether a test for a key that upstream no longer uses keeps this from running; the test has its own finding."""
    return reference is not None and any(
        _knows_key(reference.resolver, guard.symbols[0], guard.text)
        and not _knows_key(side.resolver, guard.symbols[0], guard.text)
        for guard in use.guards
        if guard.kind is GuardKind.KEY
    )


def _knows_key(resolver: Resolver, symbol: str, key: str) -> bool:
    """Whether the module that owns a dictionary uses this key anywhere."""
    modules = {target.module for target in resolver.resolve(symbol).targets}
    return any(key in (resolver.summary(module) or {}).get("keys", ()) for module in modules)


def _existed(symbol: str, reference: Side | None) -> bool:
    return reference is not None and reference.resolver.resolve(symbol).state is State.PRESENT


def _root_lacks(use: Use, resolver: Resolver) -> bool:
    """Whether the import that the use goes through is what is missing; the import has its own finding."""
    return use.root != "" and resolver.resolve(use.root).state is State.MISSING


def _of_missing(
    use: Use, symbol: str, resolution: Resolution, side: Side, reference: Side | None, rescued: frozenset[str]
) -> Iterator[UsageFinding]:
    existed = _existed(symbol, reference)
    lacking = resolution.lacking
    if use.kind not in _IMPORTS and (_root_lacks(use, side.resolver) or (use.fallback and use.symbol == use.root)):
        return
    text = f"{_short(lacking)} does not exist."
    lazy = use.guarded(GuardKind.LAZY)
    fails = Severity.CALL if lazy else Severity.IMPORT
    if use.kind in _IMPORTS:
        module = side.resolver.resolve(symbol.rpartition(".")[0]).state is State.MISSING
        if not caught(use, "ImportError", *(["ModuleNotFoundError"] if module else [])):
            yield _finding(use, fails, "missing-import", lacking, text)
        elif existed and symbol not in rescued:
            yield _finding(use, Severity.SILENT, "hidden-import", lacking, f"{text} The handler hides it.")
    elif use.kind in _ARE_SET:
        if existed and not use.called_here:
            yield _finding(use, Severity.SILENT, f"dead-{use.kind.value}", lacking, f"{text} So {_WORDS[use.kind]}.")
    elif use.kind in {UseKind.FIELD, UseKind.STRING, UseKind.KEY} or use.bound or resolution.soft:
        # An instance may have more than its declared class, and a string may be something else.
        if existed and not caught(use, "AttributeError", "ImportError"):
            yield _finding(use, Severity.CALL, "missing-member", lacking, text)
        elif existed:
            yield _finding(use, Severity.SILENT, "hidden-member", lacking, f"{text} The guard hides it.")
    elif use.kind in _READS:
        if not caught(use, "AttributeError"):
            yield _finding(use, fails, "missing-attribute", lacking, text)
        elif existed:
            yield _finding(use, Severity.SILENT, "hidden-attribute", lacking, f"{text} The guard hides it.")


def _of_present(
    use: Use, symbol: str, resolution: Resolution, side: Side, reference: Side | None
) -> Iterator[UsageFinding]:
    upstream = next((t.where for t in resolution.targets if t.path), "")
    before = reference.resolver.resolve(symbol) if reference is not None else None
    old = before.targets if before is not None and before.state is State.PRESENT else ()
    if use.arguments is not None:
        problem = call_problem(side.resolver, resolution.targets, use.arguments, bound=use.bound)
        if problem:
            soft = use.bound and use.kind is not UseKind.SUPER
            fits_before = reference is not None and not call_problem(
                reference.resolver, old, use.arguments, bound=use.bound
            )
            if not caught(use, "TypeError") and (not soft or (old and fits_before)):
                severity = Severity.CALL if use.guarded(GuardKind.LAZY) else Severity.IMPORT
                yield _finding(use, severity, "call-does-not-fit", symbol, f"{_short(symbol)}: {problem}.", upstream)
            return
        if reference is not None and old:
            args = (use, resolution.targets, side.resolver, old, reference.resolver)
            for rule, severity, message in (
                ("argument-moved", Severity.MOVED, argument_moved(*args)),
                ("argument-ignored", Severity.SILENT, ignored_argument(*args)),
                ("result-length", Severity.CALL, unpacking(*args)),
            ):
                if message:
                    yield _finding(use, severity, rule, symbol, f"{_short(symbol)}: {message}.", upstream)
    elif use.kind in {UseKind.OVERRIDE, UseKind.PATCH} and use.signature is not None and reference is not None and old:
        message = callers_misfit(use, resolution.targets, side.resolver, old, reference.resolver)
        if message:
            yield _finding(
                use, Severity.MISFIT, f"{use.kind.value}-misfit", symbol, f"{_short(symbol)}: {message}.", upstream
            )
    elif use.kind is UseKind.KEY and reference is not None and old:
        yield from _of_key(use, symbol, resolution, side, reference, upstream)


def _of_key(
    use: Use, symbol: str, resolution: Resolution, side: Side, reference: Side, upstream: str
) -> Iterator[UsageFinding]:
    """A dictionary's key that the module which owns the dictionary used before, and does not use any more."""
    before, after = (_knows_key(resolver, symbol, use.key) for resolver in (reference.resolver, side.resolver))
    if resolution.targets and before and not after:
        message = f"{_short(symbol)} has no key {use.key!r} any more."
        severity = Severity.SILENT if use.guarded(GuardKind.PRESENT) else Severity.CALL
        yield _finding(use, severity, "missing-key", symbol, message, upstream)


def _short(symbol: str) -> str:
    return symbol.removeprefix("megatron.")
