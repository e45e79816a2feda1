"""Names of one module by scope, as Python's own rules see them: what each is bound to, and where. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Binding", "BindingKind", "Scope", "absolute_import", "build_scopes"]

type _Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
type _Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class BindingKind:
    """What binds a name."""

    IMPORT = "import"
    VALUE = "value"
    ANNOTATION = "annotation"
    FUNCTION = "function"
    CLASS = "class"
    SELF = "self"
    OTHER = "other"


@dataclass(frozen=True)
class Binding:
    """One binding of a name.

    Attributes:
        kind: a value of :class:`BindingKind`.
        symbol: absolute dotted name of what is imported.
        node: the value, annotation, function or class.
        optional: inside a handler, a ``try`` body or a branch, so there may be another one in its place.
        fallback: inside a handler or an ``else`` branch.
    """

    kind: str
    symbol: str = ""
    node: ast.AST | None = None
    optional: bool = False
    fallback: bool = False


@dataclass
class Scope:
    """One scope and its bindings in the order of the text."""

    node: ast.AST
    parent: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    outer_names: set[str] = field(default_factory=set)

    @property
    def is_class(self) -> bool:
        """Whether functions inside do not see its names."""
        return isinstance(self.node, ast.ClassDef)

    def find(self, name: str) -> tuple[Scope, list[Binding]] | None:
        """The scope that a name read here is bound in, and its bindings there."""
        scope: Scope | None = self
        first = True
        while scope is not None:
            visible = first or not scope.is_class
            if visible and name in scope.bindings and name not in scope.outer_names:
                return scope, scope.bindings[name]
            first = False
            scope = scope.parent
        return None


def absolute_import(statement: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Absolute name of the module that an import statement inside ``module`` imports from."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - statement.level + (1 if is_package else 0)]
    return ".".join([*base, statement.module] if statement.module else base)


def build_scopes(tree: ast.Module, module: str, *, is_package: bool) -> dict[ast.AST, Scope]:
    """All scopes of a module by their node; the module itself is one of them."""
    builder = _Builder(module, is_package)
    top = builder.enter(tree, None)
    builder.block(tree.body, top, optional=False, fallback=False)
    return builder.scopes


class _Builder:
    def __init__(self, module: str, is_package: bool) -> None:
        self.module = module
        self.is_package = is_package
        self.scopes: dict[ast.AST, Scope] = {}

    def enter(self, node: ast.AST, parent: Scope | None) -> Scope:
        scope = self.scopes[node] = Scope(node, parent)
        return scope

    def bind(self, scope: Scope, name: str, binding: Binding) -> None:
        target: Scope = scope
        while name in target.outer_names and target.parent is not None:
            target = target.parent
        target.bindings.setdefault(name, []).append(binding)

    def block(self, body: list[ast.stmt], scope: Scope, *, optional: bool, fallback: bool) -> None:
        for statement in body:
            self.statement(statement, scope, optional=optional, fallback=fallback)

    def statement(self, node: ast.stmt, scope: Scope, *, optional: bool, fallback: bool) -> None:
        def bind(name: str, kind: str, symbol: str = "", value: ast.AST | None = None) -> None:
            self.bind(scope, name, Binding(kind, symbol, value, optional, fallback))

        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                scope.outer_names |= set(names)
            case ast.Import():
                for alias in node.names:
                    head = alias.name.partition(".")[0]
                    bind(alias.asname or head, BindingKind.IMPORT, alias.name if alias.asname else head)
            case ast.ImportFrom():
                base = absolute_import(node, self.module, is_package=self.is_package)
                for alias in node.names:
                    bind(alias.asname or alias.name, BindingKind.IMPORT, f"{base}.{alias.name}")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                bind(node.name, BindingKind.FUNCTION, value=node)
                for outside in (*node.decorator_list, *_defaults(node)):
                    self.expression(outside, scope)
                self.function(node, scope)
            case ast.ClassDef():
                bind(node.name, BindingKind.CLASS, value=node)
                for outside in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
                    self.expression(outside, scope)
                self.block(node.body, self.enter(node, scope), optional=False, fallback=False)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        bind(target.id, BindingKind.VALUE, value=value)
                    else:
                        for name in _stored(target):
                            bind(name, BindingKind.OTHER)
                self.expression(value, scope)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=given):
                if given is not None or not scope.is_class:
                    bind(name, BindingKind.ANNOTATION, value=annotation)
                if given is not None:
                    self.expression(given, scope)
            case ast.Try() | ast.TryStar():
                self.block(node.body, scope, optional=True, fallback=fallback)
                for handler in node.handlers:
                    self.block(handler.body, scope, optional=True, fallback=True)
                self.block(node.orelse, scope, optional=True, fallback=fallback)
                self.block(node.finalbody, scope, optional=optional, fallback=fallback)
            case ast.If():
                self.expression(node.test, scope)
                self.block(node.body, scope, optional=True, fallback=fallback)
                self.block(node.orelse, scope, optional=True, fallback=True)
            case _:
                self.other(node, scope, optional=optional, fallback=fallback)

    def other(self, node: ast.AST, scope: Scope, *, optional: bool, fallback: bool) -> None:
        """Loops, ``with``, ``match`` and plain expressions: every name that they store is bound to something else."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child, scope, optional=optional, fallback=fallback)
            elif isinstance(child, ast.expr):
                for name in _stored(child):
                    self.bind(scope, name, Binding(BindingKind.OTHER))
                self.expression(child, scope)
            else:
                named = getattr(child, "name", None)
                if isinstance(named, str):
                    self.bind(scope, named, Binding(BindingKind.OTHER))
                self.other(child, scope, optional=optional, fallback=fallback)

    def function(self, node: _Function, scope: Scope) -> None:
        inner = self.enter(node, scope)
        found = node.args
        arguments = [*found.posonlyargs, *found.args, *found.kwonlyargs]
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in getattr(node, "decorator_list", []))
        for index, argument in enumerate(arguments):
            if index == 0 and scope.is_class and not static and argument in (*found.posonlyargs, *found.args):
                binding = Binding(BindingKind.SELF, node=scope.node)
            elif argument.annotation is not None:
                binding = Binding(BindingKind.ANNOTATION, node=argument.annotation)
            else:
                binding = Binding(BindingKind.OTHER)
            inner.bindings[argument.arg] = [binding]
        for variadic in filter(None, (found.vararg, found.kwarg)):
            inner.bindings[variadic.arg] = [Binding(BindingKind.OTHER)]
        if isinstance(node, ast.Lambda):
            self.expression(node.body, inner)
        else:
            self.block(node.body, inner, optional=False, fallback=False)

    def expression(self, node: ast.expr, scope: Scope) -> None:
        """Lambdas and comprehensions inside an expression, and names bound by ``:=``."""
        match node:
            case ast.Lambda():
                self.function(node, scope)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self.comprehension(node, scope)
            case _:
                if isinstance(node, ast.NamedExpr):
                    self.bind(scope, node.target.id, Binding(BindingKind.OTHER))
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.expression(child, scope)
                    elif isinstance(child, ast.keyword):
                        self.expression(child.value, scope)

    def comprehension(self, node: _Comprehension, scope: Scope) -> None:
        inner = self.enter(node, scope)
        for generator in node.generators:
            for name in _stored(generator.target):
                inner.bindings[name] = [Binding(BindingKind.OTHER)]
            self.expression(generator.iter, inner)
            for condition in generator.ifs:
                self.expression(condition, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.expression(part, inner)


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    yield from node.args.defaults
    yield from (default for default in node.args.kw_defaults if default is not None)


def _stored(node: ast.AST) -> Iterator[str]:
    """Names that a target or pattern stores, not those of a scope inside it."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
        return
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return
    for child in ast.iter_child_nodes(node):
        yield from _stored(child)
