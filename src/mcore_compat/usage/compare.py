"""What changed between two Megatrons about one call, override or replacement. Each function returns "" or a reason."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_compat.usage.model import Arguments, Signature, Use
from mcore_compat.usage.resolve import Resolver, Target
from mcore_compat.usage.signatures import signatures_of

__all__ = ["argument_moved", "callers_misfit", "ignored_argument", "unpacking"]

type Targets = tuple[Target, ...]


def _one(resolver: Resolver, targets: Targets, *, bound: bool) -> Signature | None:
    """The signature if there is exactly one."""
    found = {s for t in targets for s in signatures_of(resolver, t, bound=bound) or (None,)}
    return found.pop() if len(found) == 1 else None


def argument_moved(use: Use, new: Targets, new_in: Resolver, old: Targets, old_in: Resolver) -> str:
    """A positional argument that now goes to another parameter, while its own is still there."""
    assert use.arguments is not None
    before, after = _one(old_in, old, bound=use.bound), _one(new_in, new, bound=use.bound)
    if before is None or after is None or use.arguments.open_positional:
        return ""
    places = zip(before.positional, after.positional, strict=False)
    for index, (was, now) in enumerate(list(places)[: use.arguments.positional]):
        names_after = {p.name for p in after}
        if was.name != now.name and (was.name in names_after or now.name in {p.name for p in before}):
            return f"argument {index + 1} was {was.name!r} and is {now.name!r}"
    return ""


def ignored_argument(use: Use, new: Targets, new_in: Resolver, old: Targets, old_in: Resolver) -> str:
    """A keyword argument that is still accepted but no longer read."""
    assert use.arguments is not None
    if len(new) != 1 or len(old) != 1 or new[0].kind != "function" or old[0].kind != "function":
        return ""
    del new_in, old_in
    ignored = [k for k in use.arguments.keywords if k in new[0].data[6] and k not in old[0].data[6]]
    accepted = {name for name, _, _ in old[0].data[2]}
    ignored = [name for name in ignored if name in accepted]
    return f"{ignored[0]!r} is accepted but no longer read" if ignored else ""


def unpacking(use: Use, new: Targets, new_in: Resolver, old: Targets, old_in: Resolver) -> str:
    """A result that is unpacked and has another length now."""
    del new_in, old_in
    if not use.unpack or len(new) != 1 or len(old) != 1 or new[0].kind != "function" or old[0].kind != "function":
        return ""
    before, after = old[0].data[5], new[0].data[5]
    if use.unpack in before and after and use.unpack not in after:
        return f"returns {after[0]} values, {use.unpack} are unpacked"
    return ""


def callers_misfit(use: Use, new: Targets, new_in: Resolver, old: Targets, old_in: Resolver) -> str:
    """Why upstream's callers can no longer call the adopter's own function in place of upstream's."""
    assert use.signature is not None
    functions = [t for t in new if t.kind == "function"]
    before = _one(old_in, tuple(t for t in old if t.kind == "function"), bound=False)
    after = _one(new_in, tuple(functions), bound=False)
    if before is None or after is None or before == after:
        return ""
    own = use.signature
    needed = [p.name for p in own if p.required and p.kind in {"", "/", "*"} and p.name in before.names]
    method = functions[0].method
    gone = [name for name in needed if name not in after.names and name in before.names]
    if gone and not after.open_keywords and gone[0] not in {"self", "cls"}:
        later = own.bound() if method else own
        if (
            len(later.positional) > len((after.bound() if method else after).positional)
            or _required(own, gone[0]) == "*"
        ):
            return f"requires {gone[0]!r}, which upstream no longer has"
    owner, _, name = use.symbol.rpartition(".")
    if name == "__init__":  # a constructor is called by the name of its class
        name = owner.rpartition(".")[2]
    added = after.names - before.names
    mine, theirs = (own.bound(), after.bound()) if method else (own, after)
    was = before.bound() if method else before
    for arguments, where in _calls(new_in, name, added):
        problem = mine.problem(arguments)
        if problem and not theirs.problem(arguments) and was.problem(arguments):
            return f"upstream calls it at {where} in a way that this one does not accept ({problem})"
    return ""


def _required(signature: Signature, name: str) -> str:
    return next((p.kind for p in signature if p.name == name and p.required), "")


def _calls(resolver: Resolver, name: str, added: frozenset[str]) -> Iterator[tuple[Arguments, str]]:
    """Upstream's calls of that name; of ``forward`` every call that gives one of the added parameters."""
    through_call = name in {"forward", "__call__"}
    for path, key in resolver.tree.keys.items():
        if not path.startswith("megatron/core/"):
            continue
        calls = resolver.cache.get(key, lambda: resolver.tree.read(path)).get("calls", {})  # noqa: B023 - called at once
        rows = calls.items() if through_call else [(name, calls.get(name, ()))]
        for _, found in rows:
            for positional, starred, keywords, more, line in found:
                if through_call and not added & set(keywords):
                    continue
                arguments = Arguments(positional, tuple(keywords), bool(starred), bool(more))
                yield arguments, f"{path}:{line}"
