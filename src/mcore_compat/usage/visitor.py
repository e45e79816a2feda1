"""One pass over a module of the adopter's: emits every use of an upstream symbol with the guards around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mcore_compat.usage.guards import guards_of_test, leaves_block
from mcore_compat.usage.model import (
    Arguments,
    Guard,
    GuardKind,
    Parameter,
    Signature,
    Use,
    UseKind,
    signature_of_node,
)
from mcore_compat.usage.scopes import Scope, absolute_import
from mcore_compat.usage.values import Evaluator, Own, Ref

__all__ = ["UseVisitor"]

_DOTTED = re.compile(r"megatron(\.[A-Za-z_]\w*)+")
_METHOD_MAKERS = {"MethodType", "partial", "partialmethod"}
_PATCHERS = {"patch", "object", "setattr", "delattr", "multiple"}
_SELF = Parameter("self")

type Guards = tuple[Guard, ...]


class UseVisitor:
    """Walks one module; ``uses`` holds what was found."""

    def __init__(self, file: str, module: str, evaluator: Evaluator, is_upstream: object, *, is_package: bool) -> None:
        """A visitor of one file.

        Args:
            file: path relative to the source's root.
            module: its dotted name.
            evaluator: of its expressions.
            is_upstream: predicate over absolute dotted names.
            is_package: whether the file is an ``__init__.py``.
        """
        self.file = file
        self.module = module
        self.evaluator = evaluator
        self.is_upstream = is_upstream
        self.is_package = is_package
        self.uses: list[Use] = []
        self._docstrings: set[int] = set()

    def run(self, tree: ast.Module) -> list[Use]:
        """All uses of the module in the order of the text."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self._docstrings.add(id(node.value))
        self._block(tree.body, self.evaluator.scopes[tree], ())
        return self.uses

    # Emitting

    def _emit(self, kind: UseKind, ref: Ref, node: ast.AST, guards: Guards, **more: object) -> None:
        use = Use(
            symbol=ref.symbol,
            kind=kind,
            file=self.file,
            line=getattr(node, "lineno", 0),
            root=ref.root,
            guards=guards,
            bound=ref.member,
            alternatives=ref.alternatives,
            fallback=ref.fallback,
        )
        self.uses.append(replace(use, **more) if more else use)  # type: ignore[arg-type]

    def _upstream(self, name: str) -> bool:
        return bool(self.is_upstream(name))  # type: ignore[operator]

    # Statements

    def _block(self, body: Sequence[ast.stmt], scope: Scope, guards: Guards) -> None:
        for statement in body:
            guards += self._statement(statement, scope, guards)

    def _statement(self, node: ast.stmt, scope: Scope, guards: Guards) -> Guards:
        """Visit one statement; returns the guards that hold for what follows it in the block."""
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, guards)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for outside in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self._expression(outside, scope, guards)
                lazy = guards if any(g.kind is GuardKind.LAZY for g in guards) else (*guards, Guard(GuardKind.LAZY))
                self._block(node.body, self.evaluator.scopes[node], lazy)
            case ast.ClassDef():
                self._class(node, scope, guards)
            case ast.If():
                return self._if(node, scope, guards)
            case ast.Assert():
                self._expression(node.test, scope, guards)
                return self._tested(node.test, scope)[0]
            case ast.Try() | ast.TryStar():
                self._try(node, scope, guards)
            case ast.With() | ast.AsyncWith():
                self._with(node, scope, guards)
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                self._assignment(node, scope, guards)
            case ast.Delete():
                self._expressions(node.targets, scope, guards)
            case _:
                self._children(node, scope, guards)
        return ()

    def _children(self, node: ast.AST, scope: Scope, guards: Guards) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, scope, guards)
            elif isinstance(child, ast.expr):
                self._expression(child, scope, guards)
            else:
                self._children(child, scope, guards)

    def _import(self, node: ast.Import | ast.ImportFrom, guards: Guards) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if self._upstream(alias.name):
                    self._emit(UseKind.IMPORT, Ref(alias.name, alias.name), alias, guards)
            return
        base = absolute_import(node, self.module, is_package=self.is_package)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            if not self._upstream(name):
                continue
            if alias.name == "*":
                self._emit(UseKind.STAR, Ref(base, base), node, guards)
            else:
                self._emit(UseKind.IMPORT, Ref(name, name), alias, guards)

    def _class(self, node: ast.ClassDef, scope: Scope, guards: Guards) -> None:
        self._expressions([*node.decorator_list, *(k.value for k in node.keywords)], scope, guards)
        bases = []
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            found = self.evaluator.value(inner, scope)
            if isinstance(found, Ref) and not found.instance:
                bases.append(found)
                self._emit(UseKind.SUBCLASS, found, base, guards)
            else:
                self._expression(base, scope, guards)
        inherited = bases or self.evaluator.bases(node)
        called = {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.value, ast.Name)
            and inner.value.id in {"self", "cls"}
        }
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                signature = _method_signature(statement)
                for owner in inherited:
                    ref = replace(owner.attribute(statement.name), member=True)
                    here = statement.name in called
                    self._emit(UseKind.OVERRIDE, ref, statement, guards, signature=signature, called_here=here)
        self._block(node.body, self.evaluator.scopes[node], guards)

    def _tested(self, test: ast.expr, scope: Scope) -> tuple[Guards, Guards]:
        return guards_of_test(
            test, lambda node: self.evaluator.symbol(node, scope), lambda name: self.evaluator.assigned(name, scope)
        )

    def _if(self, node: ast.If, scope: Scope, guards: Guards) -> Guards:
        yes, no = self._tested(node.test, scope)
        self._expression(node.test, scope, guards)
        self._block(node.body, scope, guards + yes)
        self._block(node.orelse, scope, guards + no)
        return (no if leaves_block(node.body) else ()) + (yes if leaves_block(node.orelse) else ())

    def _try(self, node: ast.Try | ast.TryStar, scope: Scope, guards: Guards) -> None:
        caught = " ".join(_exception_names(node.handlers))
        first = len(self.uses)
        inside = (*guards, Guard(GuardKind.TRY, text=caught)) if node.handlers else guards
        self._block(node.body, scope, inside)
        tried = tuple(
            dict.fromkeys(u.symbol for u in self.uses[first:] if u.kind not in {UseKind.OVERRIDE, UseKind.STORE})
        )
        for handler in node.handlers:
            self._block(handler.body, scope, (*guards, Guard(GuardKind.HANDLER, tried, text=caught)))
        self._block(node.orelse, scope, inside)
        self._block(node.finalbody, scope, guards)

    def _with(self, node: ast.With | ast.AsyncWith, scope: Scope, guards: Guards) -> None:
        inside = guards
        for item in node.items:
            self._expression(item.context_expr, scope, guards)
            call = item.context_expr
            if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) == "suppress":
                inside = (*inside, Guard(GuardKind.TRY, text=" ".join(ast.unparse(a) for a in call.args)))
        self._block(node.body, scope, inside)

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, scope: Scope, guards: Guards) -> None:
        if node.value is not None:
            first = len(self.uses)
            self._expression(node.value, scope, guards)
            self._note_unpacking(node, first)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if not isinstance(target, ast.Attribute):
                self._expression(target, scope, guards)
                continue
            found = self.evaluator.value(target, scope)
            if isinstance(found, Ref):
                self._stored(found, node.value, target, scope, guards)
            else:
                self._expression(target.value, scope, guards)

    def _note_unpacking(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, first: int) -> None:
        """Mark the call whose result is unpacked; it was emitted before the uses among its arguments."""
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or len(self.uses) <= first:
            return
        target, use = node.targets[0], self.uses[first]
        plain = isinstance(target, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in target.elts)
        is_call = use.kind in {UseKind.CALL, UseKind.SUPER} and use.line == node.value.lineno
        if plain and is_call and isinstance(node.value.func, ast.Name | ast.Attribute):
            self.uses[first] = replace(use, unpack=len(target.elts))  # type: ignore[attr-defined]

    def _stored(self, target: Ref, value: ast.expr | None, node: ast.AST, scope: Scope, guards: Guards) -> None:
        """An attribute of a module, a class or an instance is set."""
        replacement = self._signature_of_value(value, scope, on_instance=target.member)
        if target.member and replacement is None and not _makes_method(value):
            self._emit(UseKind.STORE, target, node, guards)
        else:
            self._emit(UseKind.PATCH, target, node, guards, signature=replacement)

    def _signature_of_value(self, value: ast.expr | None, scope: Scope, *, on_instance: bool) -> Signature | None:
        if value is None:
            return None
        bound = False
        if isinstance(value, ast.Call):
            called = getattr(value.func, "attr", getattr(value.func, "id", ""))
            if called == "__get__" and isinstance(value.func, ast.Attribute):
                value, bound = value.func.value, True
            elif called == "MethodType" and value.args:
                value, bound = value.args[0], True
            elif called in {"staticmethod", "classmethod"} and value.args:
                value = value.args[0]
            else:
                return None
        found = self.evaluator.value(value, scope)
        if not isinstance(found, Own) or not isinstance(
            found.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            return None
        if getattr(found.node, "decorator_list", None):
            return None
        signature = signature_of_node(found.node)
        # A plain function on an instance is not bound, so it has no first parameter to leave out.
        return Signature((_SELF, *signature.parameters)) if on_instance and not bound else signature

    # Expressions

    def _expressions(self, nodes: Iterable[ast.expr], scope: Scope, guards: Guards) -> None:
        for node in nodes:
            self._expression(node, scope, guards)

    def _expression(self, node: ast.expr, scope: Scope, guards: Guards) -> None:
        match node:
            case ast.Attribute():
                self._attribute(node, scope, guards)
            case ast.Call():
                self._call(node, scope, guards)
            case ast.Lambda():
                lazy = (*guards, Guard(GuardKind.LAZY))
                self._expression(node.body, self.evaluator.scopes[node], lazy)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._children(node, self.evaluator.scopes.get(node, scope), guards)
            case ast.IfExp():
                yes, no = self._tested(node.test, scope)
                self._expression(node.test, scope, guards)
                self._expression(node.body, scope, guards + yes)
                self._expression(node.orelse, scope, guards + no)
            case ast.BoolOp():
                inside = guards
                for value in node.values:
                    self._expression(value, scope, inside)
                    yes, no = self._tested(value, scope)
                    inside += yes if isinstance(node.op, ast.And) else no
            case ast.Constant(value=str() as text) if id(node) not in self._docstrings:
                if _DOTTED.fullmatch(text) and self._upstream(text):
                    self._emit(UseKind.STRING, Ref(text, ""), node, guards)
            case ast.Name():
                pass
            case _:
                self._key_read(node, scope, guards)
                self._children(node, scope, guards)

    def _key_read(self, node: ast.expr, scope: Scope, guards: Guards) -> None:
        """``"key" in x`` and ``x["key"]`` where ``x`` is a value of upstream's."""
        match node:
            case ast.Compare(left=ast.Constant(value=str() as key), ops=[ast.In() | ast.NotIn()], comparators=[owner]):
                around = (*guards, Guard(GuardKind.PRESENT))
            case ast.Subscript(value=owner, slice=ast.Constant(value=str() as key), ctx=ast.Load()):
                around = guards
            case _:
                return
        found = self.evaluator.value(owner, scope)
        if isinstance(found, Ref) and not found.instance:
            self._emit(UseKind.KEY, found, node, around, key=key)

    def _attribute(self, node: ast.Attribute, scope: Scope, guards: Guards) -> None:
        found = self.evaluator.value(node, scope)
        if isinstance(found, Ref):
            kind = UseKind.FIELD if found.member else UseKind.ATTRIBUTE
            self._emit(kind, found, node, guards)
        if not isinstance(found, Ref) or not _is_path(node):
            self._expression(node.value, scope, guards)

    def _call(self, node: ast.Call, scope: Scope, guards: Guards) -> None:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        first = node.args[0] if node.args else None
        if called in {"hasattr", "getattr", "setattr", "delattr"} and first is not None and len(node.args) >= 2:
            if self._named_attribute(called, node, scope, guards):
                return
        elif called in _PATCHERS and self._patcher(node, scope, guards):
            return
        elif called == "import_module" and isinstance(first, ast.Constant) and self._upstream(str(first.value)):
            self._emit(UseKind.IMPORT, Ref(str(first.value), str(first.value)), node, guards)
            return
        function = self.evaluator.value(node.func, scope)
        if called in {"partial", "partialmethod"} and first is not None:
            target = self.evaluator.value(first, scope)
            if isinstance(target, Ref) and not target.instance:
                self._emit(UseKind.CALL, target, node, guards, arguments=Arguments.of_call(node, skip=1, partial=True))
        elif isinstance(function, Ref) and not function.instance:
            self._emit(UseKind.CALL, function, node, guards, arguments=Arguments.of_call(node))
            if not _is_path(node.func):
                self._children(node.func, scope, guards)
        elif not self._super(node, scope, guards):
            self._expression(node.func, scope, guards)
        self._expressions(node.args, scope, guards)
        self._expressions((keyword.value for keyword in node.keywords), scope, guards)

    def _super(self, node: ast.Call, scope: Scope, guards: Guards) -> bool:
        """``super().name(…)`` in a class with one upstream base."""
        function = node.func
        if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call)):
            return False
        if getattr(function.value.func, "id", "") != "super":
            return False
        home: Scope | None = scope
        while home is not None and not home.is_class:
            home = home.parent
        if home is None or not isinstance(home.node, ast.ClassDef) or len(home.node.bases) != 1:
            return False
        bases = self.evaluator.bases(home.node)
        direct = self.evaluator.value(home.node.bases[0], home.parent or home)
        if len(bases) == 1 and isinstance(direct, Ref):
            ref = replace(bases[0].attribute(function.attr), member=True)
            self._emit(UseKind.SUPER, ref, node, guards, arguments=Arguments.of_call(node))
            return True
        return False

    def _named_attribute(self, called: str, node: ast.Call, scope: Scope, guards: Guards) -> bool:
        owner, name = self.evaluator.value(node.args[0], scope), node.args[1]
        if not isinstance(owner, Ref) or not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            return False
        target = owner.attribute(name.value)
        if called == "setattr":
            value = node.args[2] if len(node.args) > 2 else None
            self._stored(target, value, node, scope, guards)
            self._expressions(node.args[2:], scope, guards)
            return True
        hidden = called == "hasattr" or len(node.args) > 2
        around = (*guards, Guard(GuardKind.PRESENT, (target.symbol,))) if hidden else guards
        self._emit(UseKind.FIELD if target.member else UseKind.ATTRIBUTE, target, node, around)
        self._expressions(node.args[2:], scope, guards)
        return True

    def _patcher(self, node: ast.Call, scope: Scope, guards: Guards) -> bool:
        """``mock.patch("…")``, ``mock.patch.object(X, "name")``, ``monkeypatch.setattr(…)``."""
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and _DOTTED.fullmatch(first.value):
            if self._upstream(first.value):
                self._emit(UseKind.PATCH, Ref(first.value, ""), node, guards)
                self._expressions([*node.args[1:], *(k.value for k in node.keywords)], scope, guards)
                return True
        elif first is not None and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
            owner, name = self.evaluator.value(first, scope), node.args[1].value
            if isinstance(owner, Ref) and isinstance(name, str):
                self._emit(UseKind.PATCH, owner.attribute(name), node, guards)
                self._expressions([*node.args[2:], *(k.value for k in node.keywords)], scope, guards)
                return True
        return False


def _method_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature | None:
    """Signature as of a plain method; None where a decorator may have changed it."""
    names = {getattr(d, "id", getattr(d, "attr", "?")) for d in node.decorator_list}
    if names <= {"override", "abstractmethod", "no_grad"}:
        return signature_of_node(node)
    if names == {"staticmethod"}:
        return Signature((_SELF, *signature_of_node(node).parameters))
    return signature_of_node(node) if names == {"classmethod"} else None


def _read_through_self(node: ast.ClassDef) -> set[str]:
    """Names that a class reads as ``self.name`` anywhere in its body."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") in {"self", "cls"}
    }


def _exception_names(handlers: Sequence[ast.ExceptHandler]) -> list[str]:
    names: list[str] = []
    for handler in handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        names += [ast.unparse(kind).rpartition(".")[2] if kind else "BaseException" for kind in kinds]
    return names


def _makes_method(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.Lambda)
    called = getattr(value.func, "attr", getattr(value.func, "id", ""))
    return called == "__get__" or called in _METHOD_MAKERS


def _is_path(node: ast.expr) -> bool:
    """Whether an expression is a plain dotted path, with nothing inside it that needs a visit of its own."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
