"""What an expression of the adopter's denotes: an upstream symbol, an instance of one, or a definition of its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mcore_compat.usage.scopes import Binding, BindingKind, Scope

__all__ = ["Evaluator", "Own", "Ref", "Value"]

_DEPTH = 12


@dataclass(frozen=True)
class Ref:
    """An upstream symbol.

    Attributes:
        symbol: absolute dotted name.
        root: the imported name that it was reached through.
        alternatives: what else the root may be bound to, with the same rest.
        fallback: the root may also be something of the adopter's own.
        instance: an instance of the class that ``symbol`` names is meant.
        member: reached through an instance at some step.
    """

    symbol: str
    root: str
    alternatives: tuple[str, ...] = ()
    fallback: bool = False
    instance: bool = False
    member: bool = False

    def attribute(self, name: str) -> Ref:
        """The attribute of that name."""
        return replace(
            self,
            symbol=f"{self.symbol}.{name}",
            alternatives=tuple(f"{other}.{name}" for other in self.alternatives),
            instance=False,
            member=self.member or self.instance,
        )


@dataclass(frozen=True)
class Own:
    """A function, class or module of the adopter's own."""

    node: ast.AST
    module: str = ""


type Value = Ref | Own | None


@dataclass
class Evaluator:
    """Evaluates expressions of one module.

    Attributes:
        scopes: of the module.
        external: resolves an imported absolute name: to an upstream symbol or to a definition in another own module.
    """

    scopes: Mapping[ast.AST, Scope]
    external: Callable[[str], Value]
    _names: dict[tuple[int, str], Value] = field(default_factory=dict)
    _stores: dict[ast.ClassDef, frozenset[str]] = field(default_factory=dict)

    def value(self, node: ast.AST | None, scope: Scope, depth: int = 0) -> Value:
        """What an expression denotes; None where that is not known."""
        if depth > _DEPTH:
            return None
        match node:
            case ast.Name(id=name):
                return self._name(name, scope, depth)
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(inner, name, scope, depth)
            case ast.Call():
                return self._call(node, scope, depth)
            case ast.Lambda():
                return Own(node)
            case ast.NamedExpr(value=inner) | ast.Await(value=inner):
                return self.value(inner, scope, depth + 1)
        return None

    def symbol(self, node: ast.expr, scope: Scope) -> str | None:
        """The upstream symbol that an expression denotes, or None."""
        found = self.value(node, scope)
        return found.symbol if isinstance(found, Ref) else None

    def assigned(self, name: str, scope: Scope) -> ast.expr | None:
        """The value of a name that is assigned exactly once."""
        found = scope.find(name)
        if found and len(found[1]) == 1 and found[1][0].kind == BindingKind.VALUE:
            node = found[1][0].node
            return node if isinstance(node, ast.expr) else None
        return None

    def annotation(self, node: ast.AST | None, scope: Scope, depth: int = 0) -> Ref | None:
        """The upstream class that an annotation names, as an instance; None if it names none or several."""
        match node:
            case ast.Constant(value=str() as text):
                try:
                    return self.annotation(ast.parse(text, mode="eval").body, scope, depth + 1)
                except (SyntaxError, ValueError):
                    return None
            case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=inner):
                return self.annotation(inner, scope, depth + 1)
            case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
                return self.annotation(left, scope, depth + 1)
            case ast.Name() | ast.Attribute():
                found = self.value(node, scope, depth + 1)
                if isinstance(found, Ref) and not found.instance and not found.member and _class_like(found.symbol):
                    return replace(found, instance=True)
        return None

    def bases(self, node: ast.ClassDef, depth: int = 0) -> list[Ref]:
        """Upstream classes that a class of the adopter's derives from, also through other classes of its own."""
        scope = self.scopes.get(node)
        found: list[Ref] = []
        if scope is None or scope.parent is None or depth > _DEPTH:
            return found
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            value = self.value(inner, scope.parent, depth + 1)
            if isinstance(value, Ref) and not value.instance:
                found.append(value)
            elif isinstance(value, Own) and isinstance(value.node, ast.ClassDef) and value.node is not node:
                found += self.bases(value.node, depth + 1)
        return found

    def _name(self, name: str, scope: Scope, depth: int) -> Value:
        located = scope.find(name)
        if located is None:
            return None
        home, bindings = located
        key = (id(home), name)
        if key not in self._names:
            self._names[key] = None  # a name that is defined by itself denotes nothing
            self._names[key] = self._bound(home, bindings, depth)
        return self._names[key]

    def _bound(self, home: Scope, bindings: list[Binding], depth: int) -> Value:
        values = [self._binding(binding, home, depth) for binding in bindings]
        refs = [value for value in values if isinstance(value, Ref)]
        if not refs:
            return values[0] if len(values) == 1 else None
        if len(values) == 1:
            return refs[0]
        others = [b for b, value in zip(bindings, values, strict=True) if not isinstance(value, Ref)]
        plain = [b for b in others if not b.optional and not _is_none(b)]
        if plain or len({(r.instance, r.member) for r in refs}) > 1:
            return None  # rebound to something else on the same path
        different = tuple(dict.fromkeys(ref.symbol for ref in refs))
        more = [other for ref in refs for other in ref.alternatives]
        return replace(
            refs[0],
            alternatives=tuple(dict.fromkeys([*different[1:], *more])),
            fallback=bool(others) or any(ref.fallback for ref in refs),
        )

    def _binding(self, binding: Binding, home: Scope, depth: int) -> Value:
        match binding.kind:
            case BindingKind.IMPORT:
                return self.external(binding.symbol)
            case BindingKind.VALUE:
                return self.value(binding.node, home, depth + 1)
            case BindingKind.ANNOTATION:
                return self.annotation(binding.node, home.parent or home, depth + 1)
            case BindingKind.FUNCTION | BindingKind.CLASS:
                return Own(binding.node) if binding.node is not None else None
        return None

    def _attribute(self, inner: ast.expr, name: str, scope: Scope, depth: int) -> Value:
        if isinstance(inner, ast.Name):
            located = scope.find(inner.id)
            if located and len(located[1]) == 1 and located[1][0].kind == BindingKind.SELF:
                owner = located[1][0].node
                return self._of_self(owner, name, depth) if isinstance(owner, ast.ClassDef) else None
        base = self.value(inner, scope, depth + 1)
        if isinstance(base, Ref):
            return base.attribute(name)
        if isinstance(base, Own) and isinstance(base.node, ast.Module):
            return self.external(f"{base.module}.{name}")
        if isinstance(base, Own) and isinstance(base.node, ast.ClassDef):
            member = next((s for s in base.node.body if isinstance(s, ast.FunctionDef) and s.name == name), None)
            return Own(member) if member is not None else None
        return None

    def _of_self(self, owner: ast.ClassDef, name: str, depth: int) -> Value:
        """An attribute of ``self``: the class's own where it has one, else that of its one upstream base."""
        scope = self.scopes.get(owner)
        if scope is None:
            return None
        if name in scope.bindings:
            bound = scope.bindings[name][0]
            return Own(bound.node) if bound.kind == BindingKind.FUNCTION and bound.node else None
        if owner not in self._stores:
            self._stores[owner] = frozenset(_self_stores(owner))
        if name in self._stores[owner] or len(owner.bases) != 1:
            return None
        bases = self.bases(owner, depth + 1)
        if len(bases) == 1 and not isinstance(self.value(owner.bases[0], scope.parent or scope), Own):
            return replace(bases[0], instance=True).attribute(name)
        return None

    def _call(self, node: ast.Call, scope: Scope, depth: int) -> Value:
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        first = node.args[0] if node.args else None
        if called == "import_module" and isinstance(first, ast.Constant) and isinstance(first.value, str):
            return self.external(first.value)
        if called == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
            base = self.value(first, scope, depth + 1)
            name = node.args[1].value
            return base.attribute(name) if isinstance(base, Ref) and isinstance(name, str) else None
        if called in {"partial", "MethodType", "wraps", "cast"}:
            position = 1 if called == "cast" else 0
            return self.value(node.args[position], scope, depth + 1) if len(node.args) > position else None
        function = self.value(node.func, scope, depth + 1)
        if isinstance(function, Ref) and not function.instance and not function.member:
            return replace(function, instance=True) if _class_like(function.symbol) else None
        return None


def _self_stores(owner: ast.ClassDef) -> Iterator[str]:
    """Attributes that the class's methods set on ``self``."""
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _is_none(binding: Binding) -> bool:
    return isinstance(binding.node, ast.Constant) and binding.node.value in {None, False}


def _class_like(symbol: str) -> bool:
    """Whether the last part is spelled like a class."""
    last = symbol.rpartition(".")[2].lstrip("_")
    return bool(last) and last[0].isupper()
