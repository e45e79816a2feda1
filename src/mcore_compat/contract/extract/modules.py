"""Look names up in a source tree: classes, methods along base classes, functions, signatures, re-exports.

Names are followed as Python binds them: the last definition counts, aliases and re-exports lead to what they stand
for, and a method that is assigned after its class replaces the one in the class. What decides at run time what a
method is (a decorator, a wrapper, a condition) cannot be followed; it is kept as a note with the method.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import griffe

from mcore_compat.contract.extract.scopes import Bound, dotted_name, exports, names_of, star_modules
from mcore_compat.contract.source.tree import SourceError, SourceTree

__all__ = ["CandidateSyntaxError", "ClassRef", "FunctionRef", "Method", "ModuleIndex", "SymbolRef"]

_FOLLOW_LIMIT = 12  # re-exports and base classes: upstream needs 4; a cycle must end
# Decorators that leave the function that runs as it is written.
_TRANSPARENT = frozenset(
    {"abstractmethod", "abc.abstractmethod", "override", "typing.override", "typing_extensions.override"}
)


class CandidateSyntaxError(SourceError):
    """A module of the candidate does not parse."""


@dataclass(frozen=True)
class FunctionRef:
    """A function or method: where it is, and its body."""

    path: str
    node: ast.FunctionDef

    @property
    def where(self) -> str:
        """``path:line``."""
        return f"{self.path}:{self.node.lineno}"

    @property
    def signature(self) -> tuple[str, ...]:
        """Compact signature: ``name`` is required, ``name=default`` is not, ``*`` and ``/`` as in Python."""
        return _signature(self.node)


@dataclass(frozen=True)
class ClassRef:
    """A class: where it is and its body."""

    path: str
    node: ast.ClassDef

    @property
    def where(self) -> str:
        """``path:line``."""
        return f"{self.path}:{self.node.lineno}"


@dataclass(frozen=True)
class Method:
    """A method as Python finds it.

    Attributes:
        function: what is called, as far as the source tells; None where it is made at run time.
        notes: what cannot be followed, and may change what runs.
    """

    function: FunctionRef | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SymbolRef:
    """What a dotted name leads to: ``module``, ``class``, ``function`` or ``value``."""

    kind: str
    path: str
    line: int = 1
    node: ast.ClassDef | ast.FunctionDef | None = None

    @property
    def signature(self) -> tuple[str, ...] | None:
        """Of a function."""
        return _signature(self.node) if isinstance(self.node, ast.FunctionDef) else None


@dataclass(frozen=True)
class _Assigned:
    """An assignment to an attribute of a class, outside of the class.

    Attributes:
        path: file of the assignment.
        owner: text of what is assigned to, e.g. ``gpt_model.GPTModel``.
        name: the attribute; None where it is computed.
        value: what is assigned.
        certain: it runs whenever its module is imported.
        line: of the assignment.
    """

    path: str
    owner: str
    name: str | None
    value: ast.expr
    certain: bool
    line: int


class ModuleIndex:
    """Parsed modules of one tree, each parsed once and only when asked for."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.syntax = functools.cache(self._syntax)
        self._names = functools.cache(self._names_in_module)
        self._assigned = functools.cache(self._assigned_to)

    def path_of(self, module: str) -> str | None:
        """File of a dotted module name, or None."""
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self.tree.files), None)

    @staticmethod
    def module_of(path: str) -> str:
        """Dotted module name of a file."""
        parts = PurePosixPath(path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _syntax(self, path: str) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's invalid escapes in docstrings are not our business
                return ast.parse(self.tree.files[path], filename=path)
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            place = f"{path}:{line}" if line else path
            raise CandidateSyntaxError(
                f"{place} in {self.tree.name} does not parse: {getattr(error, 'msg', error)}.",
                "this candidate cannot be imported either; take another build of it.",
            ) from error

    def _names_in_module(self, path: str) -> Mapping[str, Bound]:
        return names_of(self.syntax(path).body, self.module_of(path), is_package=path.endswith("__init__.py"))

    def find_class(self, name: str, *modules: str) -> ClassRef | None:
        """Find a class in the first of ``modules`` that has it, else anywhere under megatron/core."""
        for module in modules:
            path = self.path_of(module)
            found = self.follow(path, name) if path else None
            if found is not None and isinstance(found.node, ast.ClassDef):
                return ClassRef(found.path, found.node)
        for path in sorted(self.tree.files):
            if path.endswith(".py") and f"class {name}" in self.tree.files[path]:
                bound = self._names(path).get(name)
                if bound and isinstance(bound.last.node, ast.ClassDef):
                    return ClassRef(path, bound.last.node)
        return None

    def name_notes(self, name: str, module: str) -> tuple[str, ...]:
        """What may give a class or function of this module another meaning than its definition has."""
        path = self.path_of(module)
        bound = self._names(path).get(name) if path else None
        if path is None or bound is None:
            return ()
        notes = [f"bound again under `{' and '.join(other.guards)}`" for other in bound.maybe]
        if bound.last.value is not None and dotted_name(bound.last.value) is None:
            notes.append(f"assigned `{_text(bound.last.value)}`")
        found = self.follow(path, name)
        if found is not None and isinstance(found.node, ast.ClassDef):
            notes += [f"decorated with `@{_text(one)}`" for one in found.node.decorator_list]
            notes += [f"made with `{k.arg}={_text(k.value)}`" for k in found.node.keywords if k.arg == "metaclass"]
        if found is not None and isinstance(found.node, ast.FunctionDef):
            notes += [f"decorated with `@{_text(one)}`" for one in found.node.decorator_list]
        return tuple(notes)

    def function(self, path: str, name: str, owner: str | None = None) -> FunctionRef | None:
        """A module-level function, or a class's own method."""
        if path not in self.tree.files:
            return None
        found = self.follow(path, owner or name)
        if owner is not None:
            is_class = found is not None and isinstance(found.node, ast.ClassDef)
            return self.own_method(ClassRef(found.path, found.node), name).function if is_class else None  # type: ignore[union-attr, arg-type]
        return self._function_of(found)

    @staticmethod
    def _function_of(found: SymbolRef | None) -> FunctionRef | None:
        return FunctionRef(found.path, found.node) if found and isinstance(found.node, ast.FunctionDef) else None

    def bases(self, ref: ClassRef) -> list[ClassRef]:
        """Direct base classes that lie inside the tree."""
        found = (self.follow(ref.path, ast.unparse(base)) for base in ref.node.bases)
        return [ClassRef(one.path, one.node) for one in found if one and isinstance(one.node, ast.ClassDef)]

    def method(self, ref: ClassRef, name: str) -> FunctionRef | None:
        """A method found along the bases, depth first as Python does for upstream's simple hierarchies."""
        return self.bound_method(ref, name).function

    def bound_method(self, ref: ClassRef, name: str, depth: int = 0) -> Method:
        """A method found along the bases, with what cannot be followed of it."""
        own = self.own_method(ref, name)
        if own.function is not None or own.notes or depth > _FOLLOW_LIMIT:
            return own
        inherited = (self.bound_method(base, name, depth + 1) for base in self.bases(ref))
        return next((one for one in inherited if one.function is not None or one.notes), Method(None))

    def own_method(self, ref: ClassRef, name: str) -> Method:
        """A class's own method: in its body, or assigned to it afterwards."""
        bound = names_of(ref.node.body).get(name)
        found = self._method_in_body(ref, name, bound) if bound else Method(None)
        for assigned in self._assigned(ref.node.name):
            if assigned.name not in {name, None} or not self._is_class(assigned, ref):
                continue
            function = self._value(assigned.path, assigned.value) if assigned.name else None
            if function is not None and assigned.certain and assigned.path == ref.path:
                found = Method(function)
                continue
            place = "" if assigned.path == ref.path else f" in {assigned.path}"
            found = Method(found.function, (*found.notes, f"set to `{_text(assigned.value)}` after its class{place}"))
        return found

    def _method_in_body(self, ref: ClassRef, name: str, bound: Bound) -> Method:
        notes = [f"defined again under `{' and '.join(other.guards)}`" for other in bound.maybe]
        node, value = bound.last.node, bound.last.value
        if isinstance(node, ast.FunctionDef):
            decorators = [_text(one) for one in node.decorator_list]
            notes += [f"decorated with `@{one}`" for one in decorators if one not in _TRANSPARENT]
            return Method(FunctionRef(ref.path, node), tuple(notes))
        if isinstance(value, ast.Name) and value.id != name and value.id in names_of(ref.node.body):
            aliased = self.own_method(ref, value.id)
            return Method(aliased.function, (*notes, *aliased.notes))
        function = self._value(ref.path, value) if value is not None else None
        if function is None:
            notes.append(f"assigned `{_text(value if value is not None else node)}` in its class")
            earlier = [one.node for one in bound.before if isinstance(one.node, ast.FunctionDef)]
            function = FunctionRef(ref.path, earlier[-1]) if earlier else None
        return Method(function, tuple(notes))

    def _value(self, path: str, value: ast.expr) -> FunctionRef | None:
        """The function that an expression at module level names, where it only names one."""
        dotted = dotted_name(value)
        found = self.follow(path, dotted) if dotted else None
        if found is None and dotted and "." in dotted:  # a method of a class, such as LanguageModule.forward
            holder, _, name = dotted.rpartition(".")
            owner = self.follow(path, holder)
            if owner is not None and isinstance(owner.node, ast.ClassDef):
                return self.method(ClassRef(owner.path, owner.node), name)
        return self._function_of(found)

    def _is_class(self, assigned: _Assigned, ref: ClassRef) -> bool:
        """Whether an assignment is to an attribute of this class; one that cannot be told counts as one."""
        found = self.follow(assigned.path, assigned.owner)
        return found is None or found.node is ref.node or not isinstance(found.node, ast.ClassDef)

    def _assigned_to(self, name: str) -> tuple[_Assigned, ...]:
        """All assignments to attributes of something that ends in a class's name, anywhere in the tree."""
        likely = re.compile(rf"\b{name}\s*\.\s*\w+\s*(:[^=\n]*)?=[^=]|\bsetattr\s*\(\s*[\w.]*\b{name}\b")
        return tuple(
            assigned
            for path in sorted(self.tree.files)
            if path.endswith(".py") and name in self.tree.files[path] and likely.search(self.tree.files[path])
            for assigned in _attribute_assignments(path, self.syntax(path))
            if assigned.owner.rpartition(".")[2] == name
        )

    def follow(self, path: str, dotted: str, depth: int = 0) -> SymbolRef | None:
        """What a (dotted) name means inside a module of the tree: through aliases, imports and ``import *``."""
        head, _, rest = dotted.partition(".")
        bound = self._names(path).get(head)
        if depth <= _FOLLOW_LIMIT:
            after = bound.last.node.lineno if bound is not None and not bound.last.guards else 0
            found = self._starred(path, dotted, after, depth)
            if found is not None:
                return found
        if bound is not None and isinstance(bound.last.node, ast.ClassDef | ast.FunctionDef):
            return self._local(path, bound.last.node) if not rest else None
        return self._followed(path, head, rest, bound, depth) if bound is not None and depth <= _FOLLOW_LIMIT else None

    def _starred(self, path: str, dotted: str, after: int, depth: int) -> SymbolRef | None:
        """A name that an ``import *`` below a line brings in."""
        module = self.syntax(path)
        for star, line in star_modules(module.body, self.module_of(path), is_package=path.endswith("__init__.py")):
            star_path = self.path_of(star)
            if line < after or star_path is None:
                continue
            if exports(self.syntax(star_path).body, dotted.partition(".")[0]):
                found = self.follow(star_path, dotted, depth + 1)
                if found is not None:
                    return found
        return None

    def _followed(self, path: str, head: str, rest: str, bound: Bound, depth: int) -> SymbolRef | None:
        """Where an import or an assignment leads."""
        if bound.last.target is not None:
            return self.symbol(f"{bound.last.target}.{rest}" if rest else bound.last.target, depth + 1)
        alias = dotted_name(bound.last.value) if bound.last.value is not None else None
        if alias is not None and alias.partition(".")[0] != head:
            found = self.follow(path, f"{alias}.{rest}" if rest else alias, depth + 1)
            if found is not None:
                return found
        if rest:
            return None
        defined = _definition_before(bound)
        return self._local(path, defined) if defined else SymbolRef("value", path, bound.last.node.lineno)

    def symbol(self, dotted: str, depth: int = 0) -> SymbolRef | None:
        """What an absolute dotted name such as ``megatron.core.utils.unwrap_model`` leads to."""
        if depth > _FOLLOW_LIMIT:
            return None
        path = self.path_of(dotted)
        if path:
            return SymbolRef("module", path)
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            holder = self.path_of(".".join(parts[:cut]))
            if holder:
                return self.follow(holder, ".".join(parts[cut:]), depth + 1)
        return None

    @staticmethod
    def _local(path: str, node: ast.ClassDef | ast.FunctionDef) -> SymbolRef:
        return SymbolRef("class" if isinstance(node, ast.ClassDef) else "function", path, node.lineno, node)


def _definition_before(bound: Bound) -> ast.ClassDef | ast.FunctionDef | None:
    """The definition that a later assignment such as ``name = wrapped(name)`` wraps."""
    definitions = [one.node for one in bound.before if isinstance(one.node, ast.ClassDef | ast.FunctionDef)]
    value = bound.last.value
    wraps = value is not None and any(
        isinstance(node, ast.Name) and node.id in {one.name for one in definitions} for node in ast.walk(value)
    )
    return definitions[-1] if definitions and wraps else None


def _attribute_assignments(path: str, module: ast.Module) -> Iterator[_Assigned]:
    """``Owner.name = value`` and ``setattr(Owner, "name", value)``, wherever they stand."""
    top = set(module.body)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                owner = dotted_name(target.value) if isinstance(target, ast.Attribute) else None
                if owner is not None and isinstance(target, ast.Attribute):
                    yield _Assigned(path, owner, target.attr, node.value, node in top, node.lineno)
        elif isinstance(node, ast.Call) and dotted_name(node.func) == "setattr" and len(node.args) == 3:
            owner = dotted_name(node.args[0])
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            certain = any(isinstance(one, ast.Expr) and one.value is node for one in top)
            if owner is not None:
                yield _Assigned(path, owner, str(name) if name else None, node.args[2], certain, node.lineno)


def _signature(function: ast.FunctionDef) -> tuple[str, ...]:
    parts: list[str] = []
    previous: griffe.ParameterKind | None = None
    kinds = griffe.ParameterKind
    for name, _, kind, default in griffe.get_parameters(function.args):
        if kind is kinds.keyword_only and previous not in {kinds.keyword_only, kinds.var_positional}:
            parts.append("*")
        if previous is kinds.positional_only and kind is not previous:
            parts.append("/")
        if kind is kinds.var_positional:
            parts.append(f"*{name}")
        elif kind is kinds.var_keyword:
            parts.append(f"**{name}")
        elif default is None:
            parts.append(name)
        else:
            parts.append(f"{name}={default if isinstance(default, str) else _text(default)}")
        previous = kind
    if previous is kinds.positional_only:
        parts.append("/")
    return tuple(parts)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
