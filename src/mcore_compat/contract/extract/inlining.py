"""Put the bodies of a model's own methods in the place of their calls, so that one function shows the whole way.

Upstream may move a part of ``forward`` into a method of its own; what happens to hook, head and loss is then the same.
Only what is asked for is inlined: calls of ``self.name(...)`` whose body leads to one of the wanted calls.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_compat.contract.extract.modules import ClassRef, FunctionRef, ModuleIndex
from mcore_compat.contract.extract.value_flow import calls, text

__all__ = ["ORIGIN", "Inliner", "bound_name"]

ORIGIN = "origin"  # attribute of an inlined node: the file that it comes from
_DEPTH_LIMIT = 4


@dataclass(frozen=True)
class Inliner:
    """Inlines methods of one model.

    Attributes:
        index: the tree.
        model: its class; methods are looked up along its bases.
        wanted: callees, e.g. ``self.output_layer``; a method that calls one of them is inlined.
        kept: callees that are never inlined.
    """

    index: ModuleIndex
    model: ClassRef
    wanted: frozenset[str]
    kept: frozenset[str] = frozenset()

    def __call__(self, function: FunctionRef) -> FunctionRef:
        """The function with all wanted methods inlined."""
        node = copy.deepcopy(function.node)
        node.body = self._body(node.body, _names_in(node), frozenset({node.name}), 0)
        return FunctionRef(function.path, node)

    def leads(self, call: ast.Call, depth: int = 0) -> FunctionRef | None:
        """The own method that is called, if its body leads to a wanted call."""
        callee = text(call.func)
        if not callee.startswith("self.") or callee.count(".") > 1 or callee in self.wanted | self.kept:
            return None
        method = self.index.method(self.model, callee.removeprefix("self."))
        if method is None or depth > _DEPTH_LIMIT or not _can_bind(method.node, call):
            return None
        in_caller = _Rename(_bind(method.node, call))
        for inner in calls(method.node.body):
            seen = in_caller.visit(copy.deepcopy(inner))
            if text(seen.func) in self.wanted or self.leads(seen, depth + 1) is not None:
                return method
        return None

    def _body(self, body: Sequence[ast.stmt], taken: set[str], inside: frozenset[str], depth: int) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in body:
            done += self._statement(statement, taken, inside, depth)
        return done

    def _statement(self, statement: ast.stmt, taken: set[str], inside: frozenset[str], depth: int) -> list[ast.stmt]:
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                setattr(statement, name, self._body(inner, taken, inside, depth))
        for handler in getattr(statement, "handlers", []):
            handler.body = self._body(handler.body, taken, inside, depth)
        if depth > _DEPTH_LIMIT or not isinstance(statement, ast.Assign | ast.Return | ast.Expr):
            return [statement]
        value = statement.value
        before: list[ast.stmt] = []
        for call in reversed(list(calls(value)) if value is not None else []):
            if call is not value and (method := self._new(call, inside)):  # hoisted: its result gets a name
                name = _fresh(f"{method.node.name}_result", taken)
                made = ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(call))
                ast.copy_location(made, call)
                before += self._statement(ast.fix_missing_locations(made), taken, inside, depth)
                _replace(statement, call, ast.copy_location(ast.Name(name, ast.Load()), call))
        value = statement.value
        method = self._new(value, inside) if isinstance(value, ast.Call) else None
        if method is None or not isinstance(value, ast.Call):
            return [*before, statement]
        inlined = _inlined(method, value, statement, taken)
        return [*before, *self._body(inlined, taken, inside | {method.node.name}, depth + 1)]

    def _new(self, call: ast.Call, inside: frozenset[str]) -> FunctionRef | None:
        method = self.leads(call)
        return method if method is not None and method.node.name not in inside else None


def _names_in(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | {
        node.arg for node in ast.walk(function) if isinstance(node, ast.arg)
    }


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _can_bind(function: ast.FunctionDef, call: ast.Call) -> bool:
    arguments = function.args
    starred = any(isinstance(one, ast.Starred) for one in call.args) or any(k.arg is None for k in call.keywords)
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    fits = len(call.args) < len(arguments.posonlyargs) + len(arguments.args)
    return not starred and not arguments.vararg and fits and all(k.arg in names for k in call.keywords)


def _bind(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """What each parameter stands for; ``self`` is left out."""
    arguments = function.args
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= {
        one.arg: default
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    given = dict(zip(positional[1:], call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    names = [*positional[1:], *(one.arg for one in arguments.kwonlyargs)]
    return {name: given.get(name, defaults.get(name, ast.Constant(None))) for name in names}


def bound_name(function: ast.FunctionDef, call: ast.Call, name: str) -> str | None:
    """The parameter of a method that is given a variable of the caller; None where that cannot be told."""
    if not _can_bind(function, call):
        return None
    return next((parameter for parameter, value in _bind(function, call).items() if text(value) == name), None)


def _inlined(method: FunctionRef, call: ast.Call, statement: ast.stmt, taken: set[str]) -> list[ast.stmt]:
    """The method's statements with the call's arguments in them; its results go where the call's result went."""
    function = copy.deepcopy(method.node)
    for node in ast.walk(function):
        setattr(node, ORIGIN, method.path)
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound = _bind(function, call)
    names: dict[str, ast.expr] = {}
    first: list[ast.stmt] = []
    for name, value in bound.items():
        if isinstance(value, ast.Name) and value.id == name:
            continue
        if name not in stored and isinstance(value, ast.Name | ast.Attribute | ast.Constant):
            names[name] = value
            continue
        local = _fresh(name, taken)
        names[name] = ast.Name(local, ast.Load())
        assigned = ast.copy_location(ast.Assign([ast.Name(local, ast.Store())], value), call)
        first.append(ast.fix_missing_locations(assigned))
    same = {name for name, value in bound.items() if isinstance(value, ast.Name) and value.id == name}
    for name in sorted(stored - set(bound) - same):
        if name in taken:
            names[name] = ast.Name(_fresh(name, taken), ast.Load())
        taken.add(name)
    renamed = _Rename(names)
    results = _Results(statement)
    body = [results.visit(renamed.visit(one)) for one in function.body]
    flat = [inner for one in body for inner in (one if isinstance(one, list) else [one])]
    return [*first, *flat]


class _Rename(ast.NodeTransformer):
    """Names of a method in the terms of its caller."""

    def __init__(self, names: dict[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.names.get(node.id)
        if value is None:
            return node
        if isinstance(node.ctx, ast.Store):
            return ast.copy_location(ast.Name(value.id, node.ctx), node) if isinstance(value, ast.Name) else node
        return ast.copy_location(copy.deepcopy(value), node)


class _Results(ast.NodeTransformer):
    """A method's ``return`` statements as what its caller does with the result."""

    def __init__(self, statement: ast.stmt) -> None:
        self.statement = statement

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.AST]:
        value = node.value if node.value is not None else ast.copy_location(ast.Constant(None), node)
        if isinstance(self.statement, ast.Return):
            return node
        if isinstance(self.statement, ast.Expr):
            return ast.copy_location(ast.Expr(value), node)
        assert isinstance(self.statement, ast.Assign)
        targets = copy.deepcopy(self.statement.targets)
        first = targets[0]
        if isinstance(first, ast.Tuple) and isinstance(value, ast.Tuple) and len(first.elts) == len(value.elts):
            pairs = zip(first.elts, value.elts, strict=True)
            return [ast.copy_location(ast.Assign([target], one), node) for target, one in pairs]
        return ast.copy_location(ast.Assign(targets, value), node)


def _replace(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    """Put one expression of a statement in the place of another."""
    for node in ast.walk(statement):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
            elif isinstance(value, list):
                setattr(node, name, [new if one is old else one for one in value])
