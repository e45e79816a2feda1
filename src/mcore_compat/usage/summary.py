"""What one upstream module defines, as plain data that a cache can keep. Pure: text in, dictionary out.

Bindings of a name are lists, in the order of the text, since a guarded definition comes in several versions:
``["f", line, parameters, decorators, wraps, returned, unused]``, ``["c", line, class]``,
``["v", line, alias or type]``, ``["i", line, level, module, name]``.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import Any

from mcore_compat.usage.model import Parameter, Signature, signature_of_node

__all__ = ["FORMAT", "signature_from", "summarise"]

# Raised whenever the data below changes its form, so that a cache of another form is not read.
FORMAT = 4

_REGISTRARS = {"register_buffer", "register_parameter", "register_module", "add_module", "setattr"}


def summarise(text: str) -> dict[str, Any]:
    """Summary of a module; ``{"broken": reason}`` if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        return {"broken": f"{getattr(error, 'msg', error)} (line {getattr(error, 'lineno', '?')})"}
    builder = _Builder()
    builder.block(tree.body, builder.names)
    found: dict[str, Any] = {"names": builder.names, "calls": _calls(tree), "keys": _keys(tree)}
    if builder.stars:
        found["stars"] = builder.stars
    if builder.exported is not None:
        found["all"] = builder.exported
    if builder.dynamic:
        found["dynamic"] = True
    return found


def signature_from(parameters: list[list[Any]]) -> Signature:
    """The signature that a summary keeps as lists."""
    return Signature(tuple(Parameter(name, kind, bool(required)) for name, kind, required in parameters))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[list[Any]]:
    return [[p.name, p.kind, int(p.required)] for p in signature_of_node(node)]


class _Builder:
    def __init__(self) -> None:
        self.names: dict[str, list[list[Any]]] = {}
        self.stars: list[list[Any]] = []
        self.exported: list[str] | None = None
        self.dynamic = False

    def block(self, body: list[ast.stmt], names: dict[str, list[list[Any]]]) -> None:
        for statement in body:
            self.statement(statement, names)

    def statement(self, node: ast.stmt, names: dict[str, list[list[Any]]]) -> None:
        top = names is self.names
        line = node.lineno
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if top and node.name == "__getattr__":
                    self.dynamic = True
                decorators = [_name_of(d) for d in node.decorator_list]
                function = ["f", line, _parameters(node), decorators, _wraps(node), _returned(node), _unused(node)]
                _add(names, node.name, function)
            case ast.ClassDef():
                _add(names, node.name, ["c", line, self.klass(node)])
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    for name in _target_names(target):
                        kept = _kept_value(value) if isinstance(target, ast.Name) else ""
                        _add(names, name, ["v", line, kept])
                        if top and name == "__all__":
                            self.exported = _strings(value)
            case ast.AnnAssign(target=ast.Name(id=name)):
                kind = "d" if node.value is None else "v"
                _add(names, name, [kind, line, ast.unparse(node.annotation), *_field(node)])
            case ast.AugAssign(target=ast.Name(id=name)):
                if top and name == "__all__":
                    more = _strings(node.value)
                    self.exported = [*self.exported, *more] if self.exported is not None and more else None
            case ast.ImportFrom():
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append([node.level, node.module or ""])
                    else:
                        _add(names, alias.asname or alias.name, ["i", line, node.level, node.module or "", alias.name])
            case ast.Import():
                for alias in node.names:
                    head = alias.name.partition(".")[0]
                    _add(names, alias.asname or head, ["i", line, 0, alias.name if alias.asname else head, ""])
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        names.pop(target.id, None)
            case ast.If():
                self.branch(node, names)
            case _:
                self.nested(node, names)

    def branch(self, node: ast.If, names: dict[str, list[list[Any]]]) -> None:
        """Both branches; one that only a type checker sees defines nothing."""
        test = node.test
        typing_only = getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"
        never = isinstance(test, ast.Constant) and not test.value
        always = isinstance(test, ast.Constant) and bool(test.value)
        if not typing_only and not never:
            self.block(node.body, names)
        if not always:
            self.block(node.orelse, names)

    def nested(self, node: ast.stmt, names: dict[str, list[list[Any]]]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child, names)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                self.block(child.body, names)
            else:
                for name in _target_names(child):
                    _add(names, name, ["v", node.lineno, ""])
        if isinstance(node, ast.Expr | ast.For) and "globals()" in ast.unparse(node):
            self.dynamic = self.dynamic or names is self.names

    def klass(self, node: ast.ClassDef) -> dict[str, Any]:
        members: dict[str, list[list[Any]]] = {}
        self.block(node.body, members)
        found: dict[str, Any] = {
            "bases": [ast.unparse(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases],
            "members": members,
            "attributes": dict(sorted(_attributes(node))),
        }
        if node.keywords:
            found["keywords"] = [f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords]
        if node.decorator_list:
            found["decorators"] = [ast.unparse(d) for d in node.decorator_list]
        return found


def _add(names: dict[str, list[list[Any]]], name: str, binding: list[Any]) -> None:
    names.setdefault(name, []).append(binding)


def _name_of(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _wraps(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """1 if a function, used as a decorator, hands everything through to what it wraps; else 0."""
    for inner in ast.walk(node):
        if inner is node or not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if inner.args.vararg and inner.args.kwarg and any("wraps" in ast.unparse(d) for d in inner.decorator_list):
            return 1
    return 0


def _returned(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    """Lengths of the tuples that a function returns; empty unless every ``return`` has a tuple in it."""
    lengths: set[int] = set()
    queue: list[ast.AST] = list(node.body)
    while queue:
        inner = queue.pop()
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(inner, ast.Yield | ast.YieldFrom):
            return []
        if isinstance(inner, ast.Return):
            if not isinstance(inner.value, ast.Tuple) or any(isinstance(e, ast.Starred) for e in inner.value.elts):
                return []
            lengths.add(len(inner.value.elts))
        queue += ast.iter_child_nodes(inner)
    return sorted(lengths)


def _unused(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters that the body never reads; none of a function without a body to speak of."""
    body = [s for s in node.body if not isinstance(s, ast.Expr | ast.Pass | ast.Raise)]
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    if not body or "locals" in names:
        return []
    found = node.args
    return sorted({a.arg for a in (*found.posonlyargs, *found.args, *found.kwonlyargs)} - names - {"self", "cls"})


def _keys(tree: ast.Module) -> list[str]:
    """Strings that the module uses as keys of dictionaries."""
    found: set[str] = set()
    for node in ast.walk(tree):
        candidates: list[ast.expr | None] = []
        match node:
            case ast.Subscript(slice=key):
                candidates = [key]
            case ast.Dict(keys=keys):
                candidates = list(keys)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
                candidates = [left]
            case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault"), args=[first, *_]):
                candidates = [first]
        found |= {c.value for c in candidates if isinstance(c, ast.Constant) and isinstance(c.value, str)}
    return sorted(key for key in found if key.isidentifier())


def _field(node: ast.AnnAssign) -> list[Any]:
    """Of a dataclass's field: whether it must be given, and its place: ``""``, ``kw`` or ``no`` for not in __init__."""
    if node.value is None:
        return [1, ""]
    if isinstance(node.value, ast.Call) and _name_of(node.value).rpartition(".")[2] == "field":
        given = {k.arg: k.value for k in node.value.keywords}
        init, only = given.get("init"), given.get("kw_only")
        place = "no" if isinstance(init, ast.Constant) and init.value is False else ""
        place = place or ("kw" if isinstance(only, ast.Constant) and only.value else "")
        return [int("default" not in given and "default_factory" not in given), place]
    return [0, ""]


def _target_names(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List | ast.Starred | ast.withitem | ast.NamedExpr):
        for child in ast.iter_child_nodes(target):
            yield from _target_names(child)


def _kept_value(value: ast.expr) -> str:
    """What is kept of an assigned value: a dotted name, the callee of a call, or a short constant."""
    if isinstance(value, ast.Name | ast.Attribute):
        return f"={ast.unparse(value)}"
    if isinstance(value, ast.Call):
        return f"({ast.unparse(value.func)[:80]}"
    if isinstance(value, ast.Constant) and isinstance(value.value, int | str | None):
        return f":{value.value!r}"[:60]
    return ""


def _strings(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.List | ast.Tuple):
        texts = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        return texts if len(texts) == len(node.elts) else None
    return None


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Attributes that methods set on ``self``, each with the annotation of the parameter that it is set from."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        types = {
            a.arg: ast.unparse(a.annotation) for a in ast.walk(method.args) if isinstance(a, ast.arg) and a.annotation
        }
        for inner in ast.walk(method):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                if isinstance(inner.value, ast.Name) and inner.value.id in {"self", "cls"}:
                    yield inner.attr, ""
            elif isinstance(inner, ast.Call) and _name_of(inner).rpartition(".")[2] in _REGISTRARS:
                yield from (
                    (a.value, "") for a in inner.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)
                )
        for inner in ast.walk(method):
            if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Name) and inner.value.id in types:
                for target in inner.targets:
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        yield target.attr, types[inner.value.id]


def _calls(tree: ast.Module) -> dict[str, list[list[Any]]]:
    """Calls by the last part of the callee's name: ``[positional, *args?, keywords, **kwargs?, line]``, each once."""
    found: dict[str, dict[tuple[Any, ...], int]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        keywords = tuple(sorted(k.arg for k in node.keywords if k.arg))
        key = (len(node.args) - starred, int(starred), keywords, int(any(k.arg is None for k in node.keywords)))
        if name:
            found.setdefault(name, {}).setdefault(key, node.lineno)
    return {
        name: [[p, s, list(k), o, line] for (p, s, k, o), line in rows.items()] for name, rows in sorted(found.items())
    }
