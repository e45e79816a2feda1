"""All uses of one adopter: reads each module once, and follows names through the adopter's own re-exports."""

from __future__ import annotations

import ast
import functools
import warnings
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mcore_compat.usage.model import Use
from mcore_compat.usage.scopes import Scope, build_scopes
from mcore_compat.usage.sources import AdopterSource
from mcore_compat.usage.values import Evaluator, Own, Ref, Value
from mcore_compat.usage.visitor import UseVisitor

__all__ = ["Extracted", "extract_uses", "module_name"]

_ROOT = "megatron"


@dataclass(frozen=True)
class Extracted:
    """What a source uses.

    Attributes:
        name: of the source.
        version: of the source.
        uses: in the order of file and line.
        unread: files that do not parse, with the reason.
        files: how many files were read.
    """

    name: str
    version: str
    uses: tuple[Use, ...] = field(repr=False)
    unread: tuple[str, ...] = ()
    files: int = 0

    @property
    def symbols(self) -> tuple[str, ...]:
        """Distinct upstream symbols, sorted."""
        return tuple(sorted({use.symbol for use in self.uses}))


@dataclass
class _Module:
    path: str
    name: str
    tree: ast.Module
    scopes: dict[ast.AST, Scope]
    evaluator: Evaluator


class _Project:
    """The adopter's own modules, parsed when they are asked for."""

    def __init__(self, source: AdopterSource) -> None:
        self.source = source
        self.unread: list[str] = []
        names = {module_name(path): path for path in source.paths if module_name(path)}
        self.own = frozenset(names)
        # A package that contains part of the megatron namespace owns that part of it.
        self.own_upstream = tuple(
            sorted({name for name in names if name.startswith(f"{_ROOT}.")} - {f"{_ROOT}.__init__"})
        )
        self.paths = {name: path for name, path in names.items() if path in source.files}
        self.module = functools.cache(self._module)
        self._known: dict[str, Value] = {}

    def is_upstream(self, name: str) -> bool:
        """Whether an absolute dotted name is Megatron's and not the adopter's own part of that namespace."""
        if name != _ROOT and not name.startswith(f"{_ROOT}."):
            return False
        return not any(name == own or name.startswith(f"{own}.") for own in self.own_upstream)

    def external(self, name: str) -> Value:
        """An imported absolute name: upstream's, or followed through the adopter's own modules."""
        if self.is_upstream(name):
            return Ref(name, name)
        if name in self.paths:
            found = self.module(name)
            return Own(found.tree, name) if found else None
        if name not in self._known:
            self._known[name] = None  # modules may import each other
            parts = name.split(".")
            for cut in range(len(parts) - 1, 0, -1):
                module = ".".join(parts[:cut])
                if module in self.paths:
                    self._known[name] = self._member(module, parts[cut:])
                    break
        return self._known[name]

    def _member(self, module: str, rest: list[str]) -> Value:
        found = self.module(module)
        if found is None:
            return None
        scope = found.scopes[found.tree]
        value = found.evaluator.value(ast.Name(rest[0], ast.Load()), scope)
        for name in rest[1:]:
            value = value.attribute(name) if isinstance(value, Ref) else None
        return Own(value.node, module) if isinstance(value, Own) else value

    def _module(self, name: str) -> _Module | None:
        path = self.paths[name]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.source.files[path])
        except (SyntaxError, ValueError, RecursionError) as error:
            self.unread.append(f"{path}: {getattr(error, 'msg', error)}")
            return None
        scopes = build_scopes(tree, name, is_package=path.endswith("__init__.py"))
        return _Module(path, name, tree, scopes, Evaluator(scopes, self.external))


def module_name(path: str) -> str:
    """Dotted name under which a file is imported: ``src/`` and folders above the package are not part of it."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    if "src" in parts:
        parts = parts[len(parts) - parts[::-1].index("src") :]
    return ".".join(parts)


def extract_uses(source: AdopterSource) -> Extracted:
    """Everything that a source uses of ``megatron.*``; patch files are read by :mod:`patch_files`."""
    project = _Project(source)
    uses: list[Use] = []
    for name, path in sorted(project.paths.items(), key=lambda pair: pair[1]):
        module = project.module(name)
        if module is None:
            continue
        visitor = UseVisitor(path, name, module.evaluator, project.is_upstream, is_package=path.endswith("__init__.py"))
        uses += visitor.run(module.tree)
    uses.sort(key=lambda use: (use.file, use.line))
    python = sum(path.endswith(".py") for path in source.files)
    return Extracted(source.name, source.version, tuple(uses), tuple(project.unread), python)
