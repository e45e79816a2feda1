"""What the statements of a module or class body bind to a name, in the order in which Python would run them.

A name may be bound more than once: defined twice, under a condition, assigned again. The last unconditional binding
is the one that counts; what comes after it under a condition is kept beside it, so that it can be reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Binding", "Bound", "absolute_module", "dotted_name", "exports", "names_of", "star_modules"]

_NEVER = frozenset({"TYPE_CHECKING", "typing.TYPE_CHECKING", "False", "0", "None"})
_ALWAYS = frozenset({"True", "1"})
_HANDLER = "except"


@dataclass(frozen=True)
class Binding:
    """One statement that binds a name.

    Attributes:
        node: the statement.
        value: the expression that is assigned, for an assignment of one name.
        target: absolute dotted name, for an import.
        guards: the conditions it stands under; ``except`` for an exception handler.
    """

    node: ast.stmt
    value: ast.expr | None = None
    target: str | None = None
    guards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bound:
    """All bindings of one name.

    Attributes:
        last: the binding that counts.
        before: bindings that ``last`` replaces, oldest first.
        maybe: bindings after ``last`` that a condition decides about.
    """

    last: Binding
    before: tuple[Binding, ...] = ()
    maybe: tuple[Binding, ...] = ()


def names_of(body: Sequence[ast.stmt], module: str = "", *, is_package: bool = False) -> Mapping[str, Bound]:
    """The names that a body binds.

    Args:
        body: statements of a module or class.
        module: dotted name of the module, for its relative imports.
        is_package: whether that module is a package's ``__init__``.
    """
    found: dict[str, list[Binding]] = {}
    for name, binding in _bindings(body, module, is_package, ()):
        found.setdefault(name, []).append(binding)
    return {name: _bound(bindings) for name, bindings in found.items()}


def _bound(bindings: list[Binding]) -> Bound:
    certain = [number for number, binding in enumerate(bindings) if not binding.guards]
    chosen = certain[-1] if certain else 0
    # A handler only replaces what could not be bound in the first place.
    maybe = tuple(binding for binding in bindings[chosen + 1 :] if _HANDLER not in binding.guards)
    return Bound(bindings[chosen], tuple(bindings[:chosen]), maybe)


def _bindings(
    body: Sequence[ast.stmt], module: str, is_package: bool, guards: tuple[str, ...]
) -> Iterator[tuple[str, Binding]]:
    for statement in body:
        for inner, condition in _inner_bodies(statement):
            yield from _bindings(inner, module, is_package, guards if condition is None else (*guards, condition))
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, Binding(statement, guards=guards)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                alone = isinstance(target, ast.Name)
                for node in ast.walk(target):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        yield node.id, Binding(statement, statement.value if alone else None, guards=guards)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            if isinstance(statement.target, ast.Name):
                yield statement.target.id, Binding(statement, statement.value, guards=guards)
        elif isinstance(statement, ast.ImportFrom):
            base = absolute_module(statement, module, is_package)
            for alias in statement.names:
                yield alias.asname or alias.name, Binding(statement, target=f"{base}.{alias.name}", guards=guards)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                head = alias.name.partition(".")[0]
                module_name = alias.name if alias.asname else head
                yield alias.asname or head, Binding(statement, target=module_name, guards=guards)


def _inner_bodies(statement: ast.stmt) -> Iterator[tuple[Sequence[ast.stmt], str | None]]:
    """Bodies inside a compound statement that run in the same scope, each with its condition."""
    if isinstance(statement, ast.If):
        test = ast.unparse(statement.test)
        if test not in _NEVER:
            yield statement.body, None if test in _ALWAYS else test
        if test not in _ALWAYS:
            yield statement.orelse, None if test in _NEVER else f"not ({test})"
    elif isinstance(statement, ast.Try):
        yield statement.body, None
        for handler in statement.handlers:
            yield handler.body, _HANDLER
        yield statement.orelse, None
        yield statement.finalbody, None
    elif isinstance(statement, ast.With):
        yield statement.body, None
    elif isinstance(statement, ast.For | ast.While):
        yield statement.body, "in a loop"
        yield statement.orelse, None


def dotted_name(node: ast.expr) -> str | None:
    """``a.b.c`` of a name or of attributes of one, None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        holder = dotted_name(node.value)
        return None if holder is None else f"{holder}.{node.attr}"
    return None


def star_modules(body: Sequence[ast.stmt], module: str, *, is_package: bool) -> list[tuple[str, int]]:
    """Modules of which everything is imported, each with its line; the last one first, since its names win."""
    found = [
        (absolute_module(statement, module, is_package), statement.lineno)
        for statement in _flat(body)
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names)
    ]
    return found[::-1]


def exports(body: Sequence[ast.stmt], name: str) -> bool:
    """Whether ``import *`` of a module hands over a name that the module has."""
    bound = names_of(body).get("__all__")
    listed = bound.last.value if bound is not None else None
    if isinstance(listed, ast.List | ast.Tuple) and all(isinstance(one, ast.Constant) for one in listed.elts):
        return any(isinstance(one, ast.Constant) and one.value == name for one in listed.elts)
    return not name.startswith("_")


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for inner, _ in _inner_bodies(statement):
            yield from _flat(inner)


def absolute_module(statement: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Absolute name of the module that an import statement in ``module`` imports from."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - statement.level + (1 if is_package else 0)]
    return ".".join([*base, statement.module] if statement.module else base)
