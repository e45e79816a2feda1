"""Looks names up in one upstream tree: through re-exports, aliases, bases, ``import *``, guarded definitions."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mcore_compat.usage.externals import CLASS_NAMES, FUNCTION_NAMES, MODULE_NAMES, external_members
from mcore_compat.usage.upstream import SummaryCache, UpstreamTree

__all__ = ["Resolution", "Resolver", "State", "Target"]

_ROOT = "megatron"
_SIBLINGS = frozenset({"training", "legacy", "inference", "post_training", "rl"})
_DEPTH = 24
_ENUM_NAMES = frozenset({"name", "value", "_name_", "_value_"})


class State(StrEnum):
    """Whether a symbol exists; ``OUTSIDE``: in a package that this tree is not about."""

    PRESENT = "present"
    MISSING = "missing"
    UNKNOWN = "unknown"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class Target:
    """One definition that a name leads to.

    Attributes:
        kind: ``module``, ``function``, ``class``, ``value`` or ``external``.
        module: dotted module that defines it; of a module, its own name; of an external, its dotted name.
        name: inside the module.
        path: file of the definition.
        line: of the definition.
        data: the binding of the summary.
        method: defined in a class.
        instance: an instance of the class is meant.
        soft: reached through a type that may be more special than what is known.
        bound: a method reached through an instance that upstream itself made.
    """

    kind: str
    module: str
    name: str = ""
    path: str = ""
    line: int = 1
    data: Any = field(default=None, compare=False, repr=False)
    method: bool = False
    instance: bool = False
    soft: bool = False
    bound: bool = False

    @property
    def where(self) -> str:
        """``path:line``."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Resolution:
    """What a symbol leads to.

    Attributes:
        state: whether it exists.
        targets: its definitions; several where they are guarded.
        lacking: the shortest prefix that does not exist.
        soft: the answer depends on an inferred type.
    """

    state: State
    targets: tuple[Target, ...] = ()
    lacking: str = ""
    soft: bool = False


class Resolver:
    """Resolves symbols in one tree; ``touched`` collects the files that an answer depends on."""

    def __init__(self, tree: UpstreamTree, cache: SummaryCache) -> None:
        self.tree = tree
        self.cache = cache
        self.touched: set[str] = set()
        self._folders = {
            "/".join(parts[:depth])
            for parts in (path.split("/") for path in (*tree.keys, *tree.native))
            for depth in range(1, len(parts))
        }
        self._steps: dict[tuple[str, str], tuple[State, tuple[Target, ...]]] = {}
        self._resolved: dict[str, Resolution] = {}
        self._definitions: dict[str, list[str]] | None = None

    # Modules

    def summary(self, module: str) -> dict[str, Any] | None:
        """Summary of a module, None if the tree has no such file."""
        base = module.replace(".", "/")
        for path in (f"{base}/__init__.py", f"{base}.py"):
            self.touched.add(path)
            if path in self.tree.keys:
                return self.cache.get(self.tree.keys[path], lambda: self.tree.read(path))  # noqa: B023 - called at once
        return None

    def path_of(self, module: str) -> str:
        """File of a module."""
        base = module.replace(".", "/")
        return f"{base}/__init__.py" if f"{base}/__init__.py" in self.tree.keys else f"{base}.py"

    def files_behind(self, symbol: str) -> frozenset[str]:
        """Files that the answer for a symbol depends on, also those that would change it by coming into being."""
        kept, self.touched = self.touched, set()
        self._steps.clear()  # a remembered step would not tell its files
        for target in self._resolve(symbol).targets:
            self.touched.add(target.path)
            if target.kind == "class":
                self.touched |= {owner.path for owner in self.mro(target)}
        found = frozenset(self.touched - {""})
        self.touched = kept | found
        return found

    def is_module(self, module: str) -> bool:
        """Whether the tree has a module or namespace package of that name."""
        base = module.replace(".", "/")
        return f"{base}.py" in self.tree.keys or base in self._folders

    def resolve(self, symbol: str) -> Resolution:
        """What an absolute dotted name leads to."""
        if symbol not in self._resolved:
            self._resolved[symbol] = self._resolve(symbol)
        return self._resolved[symbol]

    def defined(self, name: str) -> list[str]:
        """Absolute names of the functions and classes of that name anywhere in the tree."""
        if self._definitions is None:
            self._definitions = {}
            for path, key in self.tree.keys.items():
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                summary = self.cache.get(key, lambda: self.tree.read(path))  # noqa: B023 - called at once
                for defined, bindings in summary.get("names", {}).items():
                    if any(binding[0] in {"f", "c"} for binding in bindings):
                        self._definitions.setdefault(defined, []).append(f"{module}.{defined}")
        return self._definitions.get(name, [])

    def _resolve(self, symbol: str) -> Resolution:
        parts = symbol.split(".")
        targets: tuple[Target, ...] = (Target("module", parts[0]),)
        soft = False
        for index, part in enumerate(parts[1:], start=2):
            state, targets = self.step(targets, part)
            soft = soft or any(target.soft for target in targets)
            if state is not State.PRESENT:
                return Resolution(state, (), ".".join(parts[:index]), soft)
            if all(target.kind == "external" for target in targets):
                return Resolution(State.PRESENT if index == len(parts) else State.UNKNOWN, targets, "", soft)
        return Resolution(State.PRESENT, targets, soft=soft)

    def step(self, targets: Iterable[Target], name: str) -> tuple[State, tuple[Target, ...]]:
        """The attribute of that name of any of the targets."""
        found: list[Target] = []
        states = set()
        targets = tuple(targets)
        for target in targets:
            if target.kind == "value" and target.data in {":None", ":False"} and len(targets) > 1:
                continue
            state, more = self._step(target, name)
            states.add(state)
            found += more
        if found:
            return State.PRESENT, tuple(dict.fromkeys(found))
        for state in (State.UNKNOWN, State.OUTSIDE, State.MISSING):
            if state in states:
                return state, ()
        return State.UNKNOWN, ()

    def _step(self, target: Target, name: str, depth: int = 0) -> tuple[State, tuple[Target, ...]]:
        if depth > _DEPTH:
            return State.UNKNOWN, ()
        if target.kind == "module":
            return self._of_module(target.module, name, depth)
        if target.kind == "class":
            return self._of_class(target, name, depth)
        if target.kind == "function":
            return (State.PRESENT, (Target("value", target.module, name),)) if name in FUNCTION_NAMES else _unknown()
        if target.kind == "external":
            return State.PRESENT, (Target("external", f"{target.module}.{name}"),)
        return self._of_value(target, name, depth)

    def _of_module(self, module: str, name: str, depth: int) -> tuple[State, tuple[Target, ...]]:
        key = (module, name)
        if key not in self._steps:
            self._steps[key] = (State.UNKNOWN, ())  # import cycles
            self._steps[key] = self._module_member(module, name, depth)
        return self._steps[key]

    def _module_member(self, module: str, name: str, depth: int) -> tuple[State, tuple[Target, ...]]:
        summary = self.summary(module)
        submodule = f"{module}.{name}"
        if summary is None:
            if self.is_module(submodule):
                return State.PRESENT, (Target("module", submodule, path=self.path_of(submodule)),)
            if module == _ROOT:
                inside = name in _SIBLINGS and "megatron/training" in self._folders
                return (State.MISSING if inside or name == "core" else State.OUTSIDE), ()
            return (State.MISSING if self.is_module(module) and not self._native(submodule) else State.UNKNOWN), ()
        if "broken" in summary:
            return _unknown()
        targets = list(self._bindings(module, summary["names"].get(name, ()), name, depth))
        if targets:
            return State.PRESENT, tuple(dict.fromkeys(targets))
        if self.is_module(submodule):
            return State.PRESENT, (Target("module", submodule, path=self.path_of(submodule)),)
        doubtful = summary.get("dynamic", False) or self._native(submodule) or name in summary["names"]
        for level, named in summary.get("stars", ()):
            state, more = self._star(self._absolute(module, level, named), name, depth)
            if state is State.PRESENT:
                return state, more
            doubtful = doubtful or state is State.UNKNOWN
        if name in MODULE_NAMES:
            return State.PRESENT, (Target("value", module, name),)
        return (State.UNKNOWN if doubtful else State.MISSING), ()

    def _star(self, module: str, name: str, depth: int) -> tuple[State, tuple[Target, ...]]:
        if not module.startswith(f"{_ROOT}."):
            return _unknown()
        summary = self.summary(module)
        if summary is None:
            return _unknown()
        exported = summary.get("all")
        if name.startswith("_") if exported is None else name not in exported:
            return State.MISSING, ()
        return self._of_module(module, name, depth + 1)

    def _native(self, module: str) -> bool:
        """Whether a module may be compiled: a file of that stem, or sources beside it."""
        base = module.replace(".", "/")
        return any(path.startswith(base) for path in self.tree.native)

    def _absolute(self, module: str, level: int, named: str) -> str:
        if not level:
            return named
        parts = module.split(".")
        package = self.path_of(module).endswith("__init__.py")
        base = parts[: len(parts) - level + (1 if package else 0)]
        return ".".join([*base, named] if named else base)

    def _bindings(self, module: str, bindings: Iterable[list[Any]], name: str, depth: int) -> Iterator[Target]:
        path = self.path_of(module)
        for binding in bindings:
            kind, line = binding[0], binding[1]
            if kind == "f":
                yield Target("function", module, name, path, line, binding)
            elif kind == "c":
                yield Target("class", module, name, path, line, binding[2])
            elif kind == "i":
                yield from self._imported(module, binding, depth)
            elif kind == "v" and str(binding[2]).startswith("="):
                state, found = self.in_module(module, binding[2][1:], depth + 1)
                yield from found if state is State.PRESENT else (Target("value", module, name, path, line, ""),)
            else:
                yield Target("value", module, name, path, line, binding[2])

    def _imported(self, module: str, binding: list[Any], depth: int) -> tuple[Target, ...]:
        _, _, level, named, name = binding
        base = self._absolute(module, level, named)
        if base != _ROOT and not base.startswith(f"{_ROOT}."):
            return (Target("external", f"{base}.{name}" if name else base),)
        if depth > _DEPTH:
            return ()
        if not name:
            return (Target("module", base, path=self.path_of(base)),) if self.is_module(base) else ()
        return self._of_module(base, name, depth + 1)[1] if self.is_module(base) else ()

    def in_module(self, module: str, dotted: str, depth: int = 0) -> tuple[State, tuple[Target, ...]]:
        """What a (dotted) expression means inside a module."""
        head, *rest = dotted.split(".")
        state, targets = self._of_module(module, head, depth + 1)
        if state is not State.PRESENT and hasattr(builtins, head):
            state, targets = State.PRESENT, (Target("external", f"builtins.{head}"),)
        for name in rest:
            if state is not State.PRESENT:
                return state, ()
            found: list[Target] = []
            for target in targets:
                found += self._step(target, name, depth + 1)[1]
            state, targets = (State.PRESENT if found else State.UNKNOWN), tuple(found)
        return state, targets

    # Classes and values

    def mro(self, target: Target, depth: int = 0) -> Iterator[Target]:
        """The class and its bases, depth first, externals included; an unreadable base is an external named ``?``."""
        yield target
        if target.kind != "class" or depth > _DEPTH:
            return
        for base in target.data["bases"]:
            state, found = self.in_module(target.module, base) if _plain(base) else _unknown()
            if state is not State.PRESENT:
                yield Target("external", "?")
            for inner in found:
                if inner.kind == "class" and inner.data is not target.data:
                    yield from self.mro(inner, depth + 1)
                elif inner.kind != "class":
                    yield inner if inner.kind == "external" else Target("external", "?")

    def _of_class(self, target: Target, name: str, depth: int) -> tuple[State, tuple[Target, ...]]:
        doubtful = False
        for owner in self.mro(target):
            if owner.kind == "external":
                members = external_members(owner.module)
                doubtful = doubtful or members is None
                if members is not None and name in members and name not in CLASS_NAMES:
                    return State.PRESENT, (Target("external", f"{owner.module}.{name}", method=True),)
                if owner.module.startswith("enum.") and name in _ENUM_NAMES:
                    return State.PRESENT, (Target("value", owner.module, name, instance=True),)
                continue
            data = owner.data
            if name in data["members"]:
                found = self._bindings(owner.module, data["members"][name], f"{owner.name}.{name}", depth)
                return State.PRESENT, tuple(replace(t, method=t.kind == "function", soft=target.soft) for t in found)
            if name in data["attributes"]:
                kind = data["attributes"][name]
                return State.PRESENT, (
                    Target("value", owner.module, name, owner.path, owner.line, kind, instance=True, soft=target.soft),
                )
            if "__getattr__" in data["members"] or any(
                "metaclass" in k and "ABC" not in k for k in data.get("keywords", ())
            ):
                doubtful = True
            if any("dataclass" in d for d in data.get("decorators", ())) and name.startswith("__dataclass_"):
                return State.PRESENT, (Target("value", owner.module, name),)
        if name in CLASS_NAMES:
            return State.PRESENT, (Target("value", target.module, name),)
        return (State.UNKNOWN if doubtful else State.MISSING), ()

    def _of_value(self, target: Target, name: str, depth: int) -> tuple[State, tuple[Target, ...]]:
        """Through the declared type, or the class that is called; a more special class may be meant."""
        text = str(target.data or "").removeprefix("(")
        for part in ("Optional[", "'", '"'):
            text = text.removeprefix(part)
        text = text.partition(" |")[0].rstrip("]'\"")
        if not _plain(text) or depth > _DEPTH:
            return _unknown()
        state, found = self.in_module(target.module, text, depth + 1)
        classes = [replace(t, soft=True, instance=True) for t in found if t.kind == "class"]
        if state is not State.PRESENT or not classes or len(classes) < len(found):
            return _unknown()
        state, members = self._step(classes[0], name, depth + 1)
        return state, tuple(replace(member, bound=member.method) for member in members)


def _plain(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _unknown() -> tuple[State, tuple[Target, ...]]:
    return State.UNKNOWN, ()
