"""Requirements of a source: what its metadata declares, what its modules import, what it calls itself."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from email.parser import HeaderParser

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from mcore_compat.contract.extract.modules import ModuleIndex
from mcore_compat.contract.extract.scopes import absolute_module
from mcore_compat.contract.model import Direction, Item, Json, VersionLabels
from mcore_compat.contract.source.tree import SourceTree

__all__ = ["extra_items", "import_items", "metadata_items", "version_labels"]

ENTRY = "megatron.core.models.gpt.gpt_model"
_OPTIONAL_GUARDS = re.compile(r"TYPE_CHECKING|HAVE_|is_.*_available|_available\b")
_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def _metadata(tree: SourceTree) -> str | None:
    paths = [path for path in tree.files if path.endswith("METADATA") or path == "PKG-INFO"]
    return tree.files[min(paths)] if paths else None


def version_labels(tree: SourceTree) -> VersionLabels:
    """Distribution and attribute version, read without running ``package_info.py``."""
    text = _metadata(tree)
    distribution = HeaderParser().parsestr(text)["Version"] if text else None
    return VersionLabels(distribution, _attribute_version(tree), tree.commit)


def _attribute_version(tree: SourceTree) -> str | None:
    text = tree.files.get("megatron/core/package_info.py", "")
    found: dict[str, str] = {}
    for name in ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE"):
        match = re.search(rf"^{name}\s*=\s*(\d+|'[^']*'|\"[^\"]*\")\s*$", text, re.MULTILINE)
        if match is None:
            return None
        found[name] = match[1].strip("'\"")
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}{found['PRE_RELEASE']}"


def metadata_items(tree: SourceTree) -> Iterator[Item]:
    """``requires-python`` and the unconditional dependencies, from metadata or pyproject.toml."""
    requires_python: Json = None
    dependencies: list[str] = []
    where = ""
    text = _metadata(tree)
    if text is not None:
        headers = HeaderParser().parsestr(text)
        requires_python = headers["Requires-Python"]
        dependencies = headers.get_all("Requires-Dist") or []
    elif "pyproject.toml" in tree.files:
        where = "pyproject.toml:1"
        try:
            project = tomllib.loads(tree.files["pyproject.toml"]).get("project", {})
        except tomllib.TOMLDecodeError:
            project = {}  # the build would fail too; the cells say so with the builder's own words
        requires_python = project.get("requires-python")
        dependencies = [d for d in project.get("dependencies", []) if isinstance(d, str)]
    if not dependencies and "megatron/core/requirements.txt" in tree.files:
        dependencies = tree.files["megatron/core/requirements.txt"].splitlines()
    yield Item("metadata.requires-python", Direction.READ, requires_python, where)
    declared = sorted({d for line in dependencies if (d := _normal(line))})
    yield Item("metadata.dependencies", Direction.READ, declared, where)


def extra_items(tree: SourceTree) -> Iterator[Item]:
    """What a wheel installs beside ``megatron``; no item where that is nothing, as in every release."""
    if tree.extras:
        yield Item("package.extras", Direction.READ, list[Json](tree.extras))


def _normal(line: str) -> str | None:
    """``name<specifier>`` of a requirement that always applies, else None."""
    try:
        requirement = Requirement(line.partition(" #")[0])
    except InvalidRequirement:
        return None
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}"


def import_items(index: ModuleIndex) -> Iterator[Item]:
    """Third-party modules without which ``megatron.core.models.gpt.gpt_model`` cannot be imported."""
    required: dict[str, str] = {}
    seen: set[str] = set()
    queue = [ENTRY]
    while queue:
        module = queue.pop()
        for part in _with_parents(module):
            path = index.path_of(part)
            if path is None or path in seen:
                continue
            seen.add(path)
            imports = _RequiredImports(part, path.endswith("__init__.py"))
            imports.visit(index.syntax(path))
            for name, line in imports.found:
                top = name.partition(".")[0]
                if top == "megatron":
                    queue.append(name)
                elif top not in sys.stdlib_module_names:
                    required.setdefault(top, f"{path}:{line}")
    for name in sorted(required):
        yield Item(f"imports.{name}", Direction.CALL, name, required[name])


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


class _RequiredImports(ast.NodeVisitor):
    """Modules that must be there when a module body runs; what an error handler or a guard makes optional is left out.

    Attributes:
        found: module name and line.
    """

    def __init__(self, own: str, is_package: bool) -> None:
        self._own = own
        self._is_package = is_package
        self.found: list[tuple[str, int]] = []

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(alias.name, node.lineno) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = absolute_module(node, self._own, self._is_package)
        self.found.append((base, node.lineno))
        if base.startswith("megatron"):  # the imported name may be a submodule
            self.found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]

    def visit_Try(self, node: ast.Try) -> None:
        if not any(_catches_import_error(handler) for handler in node.handlers):
            for statement in (*node.body, *node.orelse, *node.finalbody):
                self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if not _OPTIONAL_GUARDS.search(ast.unparse(node.test)):
            for statement in (*node.body, *node.orelse):
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Nothing in it runs on import."""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Nothing in it runs on import."""


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in _IMPORT_ERRORS for kind in kinds)
