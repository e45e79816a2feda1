"""Look names up in a source tree: classes, methods along base classes, functions, signatures, re-exports.

Signatures come from griffe's static visitor; bodies, which griffe does not keep, and imports, which it resolves
only for a whole loaded package, from ``ast``.
"""

from __future__ import annotations

import ast
import functools
import warnings
from dataclasses import dataclass
from pathlib import PurePosixPath

import griffe

from mcore_compat.contract.source.tree import SourceError, SourceTree

__all__ = ["CandidateSyntaxError", "ClassRef", "FunctionRef", "ModuleIndex", "SymbolRef", "signature_of"]

_FOLLOW_LIMIT = 12  # re-exports and base classes: upstream needs 4; a cycle must end


class CandidateSyntaxError(SourceError):
    """A module of the candidate does not parse."""


@dataclass(frozen=True)
class FunctionRef:
    """A function or method: where it is, its body, its signature."""

    path: str
    node: ast.FunctionDef
    signature: tuple[str, ...]

    @property
    def where(self) -> str:
        """``path:line``."""
        return f"{self.path}:{self.node.lineno}"


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
class SymbolRef:
    """What a dotted name leads to: ``module``, ``class``, ``function`` or ``value``."""

    kind: str
    path: str
    line: int = 1
    signature: tuple[str, ...] | None = None


def signature_of(function: griffe.Function) -> tuple[str, ...]:
    """Compact signature: ``name`` is required, ``name=default`` is not, ``*`` and ``/`` as in Python."""
    parts: list[str] = []
    previous: griffe.ParameterKind | None = None
    for parameter in function.parameters:
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and previous not in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        ):
            parts.append("*")
        if previous is griffe.ParameterKind.positional_only and kind is not previous:
            parts.append("/")
        if kind is griffe.ParameterKind.var_positional:
            parts.append(f"*{parameter.name}")
        elif kind is griffe.ParameterKind.var_keyword:
            parts.append(f"**{parameter.name}")
        elif parameter.default is None:
            parts.append(parameter.name)
        else:
            parts.append(f"{parameter.name}={parameter.default}")
        previous = kind
    return tuple(parts)


class ModuleIndex:
    """Parsed modules of one tree, each parsed once and only when asked for."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.syntax = functools.cache(self._syntax)
        self.api = functools.cache(self._api)

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

    def _api(self, path: str) -> griffe.Module:
        self.syntax(path)  # griffe would raise the bare SyntaxError
        module = self.module_of(path)
        file = PurePosixPath(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            visited = griffe.visit(module, filepath=file, code=self.tree.files[path])  # type: ignore[arg-type]
        assert isinstance(visited, griffe.Module)
        return visited

    def find_class(self, name: str, *modules: str) -> ClassRef | None:
        """Find a class in the first of ``modules`` that has it, else anywhere under megatron/core."""
        for module in modules:
            path = self.path_of(module)
            if path and (node := _member(self.syntax(path), ast.ClassDef, name)):
                return ClassRef(path, node)
        for path in sorted(self.tree.files):
            if path.endswith(".py") and f"class {name}" in self.tree.files[path]:
                node = _member(self.syntax(path), ast.ClassDef, name)
                if node:
                    return ClassRef(path, node)
        return None

    def function(self, path: str, name: str, owner: str | None = None) -> FunctionRef | None:
        """A module-level function, or a class's own method."""
        if path not in self.tree.files:
            return None
        scope: ast.Module | ast.ClassDef | None = self.syntax(path)
        if owner is not None:
            scope = _member(self.syntax(path), ast.ClassDef, owner)
        node = _member(scope, ast.FunctionDef, name) if scope else None
        if node is None:
            return None
        holder: griffe.Module | griffe.Class = self.api(path)
        if owner is not None:
            holder = holder.members[owner]  # type: ignore[assignment]
        found = holder.members.get(name)
        signature = signature_of(found) if isinstance(found, griffe.Function) else ()
        return FunctionRef(path, node, signature)

    def bases(self, ref: ClassRef) -> list[ClassRef]:
        """Direct base classes that lie inside the tree."""
        found = []
        for base in ref.node.bases:
            name = ast.unparse(base).rpartition(".")[2]
            target = self.follow(ref.path, ast.unparse(base))
            if target is not None and target.kind == "class":
                node = _member(self.syntax(target.path), ast.ClassDef, name)
                found += [ClassRef(target.path, node)] if node else []
        return found

    def method(self, ref: ClassRef, name: str, depth: int = 0) -> FunctionRef | None:
        """A method found along the bases, depth first as Python does for upstream's simple hierarchies."""
        own = self.function(ref.path, name, ref.node.name)
        if own is not None or depth > _FOLLOW_LIMIT:
            return own
        return next((m for base in self.bases(ref) if (m := self.method(base, name, depth + 1))), None)

    def follow(self, path: str, dotted: str, depth: int = 0) -> SymbolRef | None:
        """What a (dotted) name means inside a module of the tree: through imports, re-exports and ``import *``."""
        head, _, rest = dotted.partition(".")
        module = self.syntax(path)
        node = _member(module, ast.ClassDef, head) or _member(module, ast.FunctionDef, head)
        if node is not None:
            return self._local(path, node) if not rest else None
        if depth > _FOLLOW_LIMIT:
            return None
        target = _imported(module, self.module_of(path), path.endswith("__init__.py")).get(head)
        if target is not None:
            return self.symbol(f"{target}.{rest}" if rest else target, depth + 1)
        for star in _star_modules(module, self.module_of(path), path.endswith("__init__.py")):
            star_path = self.path_of(star)
            if star_path and (found := self.follow(star_path, dotted, depth + 1)):
                return found
        for name, line in _assigned(module):
            if name == head and not rest:
                return SymbolRef("value", path, line)
        return None

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

    def _local(self, path: str, node: ast.ClassDef | ast.FunctionDef) -> SymbolRef:
        if isinstance(node, ast.ClassDef):
            return SymbolRef("class", path, node.lineno)
        function = self.function(path, node.name)
        return SymbolRef("function", path, node.lineno, function.signature if function else None)


def _body(scope: ast.Module | ast.ClassDef) -> list[ast.stmt]:
    """Statements of a scope, with those inside ``if`` and ``try`` (upstream guards definitions that way)."""
    flat: list[ast.stmt] = []
    queue = list(scope.body)
    while queue:
        statement = queue.pop(0)
        flat.append(statement)
        if isinstance(statement, ast.If):
            queue[:0] = [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.Try):
            queue[:0] = [*statement.body, *statement.orelse, *(s for h in statement.handlers for s in h.body)]
    return flat


def _member[Node: (ast.ClassDef, ast.FunctionDef)](
    scope: ast.Module | ast.ClassDef, kind: type[Node], name: str
) -> Node | None:
    return next((node for node in _body(scope) if isinstance(node, kind) and node.name == name), None)


def _assigned(module: ast.Module) -> list[tuple[str, int]]:
    names: list[tuple[str, int]] = []
    for statement in _body(module):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names += [(t.id, statement.lineno) for t in targets if isinstance(t, ast.Name)]
    return names


def _imported(module: ast.Module, own: str, is_package: bool) -> dict[str, str]:
    """Names bound by a module's imports, each with the absolute dotted name it stands for."""
    found: dict[str, str] = {}
    for statement in _body(module):
        if isinstance(statement, ast.ImportFrom):
            base = absolute_module(statement, own, is_package)
            for alias in statement.names:
                found.setdefault(alias.asname or alias.name, f"{base}.{alias.name}")
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                head = alias.name.partition(".")[0]
                found.setdefault(alias.asname or head, alias.name if alias.asname else head)
    return found


def _star_modules(module: ast.Module, own: str, is_package: bool) -> list[str]:
    return [
        absolute_module(statement, own, is_package)
        for statement in _body(module)
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names)
    ]


def absolute_module(statement: ast.ImportFrom, own: str, is_package: bool) -> str:
    """Absolute name of the module that an import statement in module ``own`` imports from."""
    if not statement.level:
        return statement.module or ""
    parts = own.split(".")
    base = parts[: len(parts) - statement.level + (1 if is_package else 0)]
    return ".".join([*base, statement.module] if statement.module else base)
