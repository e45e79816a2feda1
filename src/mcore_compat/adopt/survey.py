"""What a repository says of Megatron: its declared dependency, its modules that import it, and what they replace."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from mcore_compat.errors import UsageError
from mcore_compat.usage.extract import extract_uses, module_name
from mcore_compat.usage.model import GuardKind, Use, UseKind
from mcore_compat.usage.sources import NoPythonError, open_source

__all__ = ["Survey", "survey"]

_MEGATRON = "megatron-core"
_REPLACES = (UseKind.PATCH, UseKind.OVERRIDE)
# A use behind one of these is meant to be absent in some release.
_TOLERANT = (
    GuardKind.TRY,
    GuardKind.HANDLER,
    GuardKind.PRESENT,
    GuardKind.ABSENT,
    GuardKind.VERSION,
    GuardKind.SIGNATURE,
    GuardKind.UNKNOWN,
)


@dataclass(frozen=True)
class Survey:
    """What was found in one repository.

    Attributes:
        package: normalised name of its distribution.
        declared: its range of megatron-core; empty: it declares none that can be read.
        extra: the optional dependencies that name megatron-core; "": the dependencies themselves, or nothing.
        python: its ``requires-python``; empty: it declares none.
        modules: its importable modules that use Megatron, sorted.
        replaced: symbols of Megatron that it patches or overrides, sorted; all of them must exist.
        tolerated: how many more it replaces behind a guard, so that they may be absent.
        unread: files that do not parse, with the reason.
    """

    package: str
    declared: SpecifierSet
    extra: str
    python: SpecifierSet
    modules: tuple[str, ...]
    replaced: tuple[str, ...]
    tolerated: int = 0
    unread: tuple[str, ...] = ()


def survey(root: Path) -> Survey:
    """Read the repository at ``root``; nothing of it is run.

    Raises:
        UsageError: it declares no package, a declaration cannot be read, or no module of it uses Megatron.
    """
    project = _project_table(root)
    declared, extra = _dependency(project)
    try:
        found = extract_uses(open_source(str(root)))
    except NoPythonError as exc:
        raise UsageError(f"{root.name} has no Python files.", "Name the folder of the repository.") from exc
    modules = sorted({module_name(use.file) for use in found.uses if _importable(root, use.file)})
    if not modules:
        raise UsageError(
            f"No package in {root.name} imports megatron.",
            "Name the folder whose pyproject.toml declares the package that does; see it with `mcore-compat uses`.",
        )
    replaced = [use for use in found.uses if use.kind in _REPLACES and _importable(root, use.file)]
    certain = {use.symbol for use in replaced if not _tolerated(use)}
    return Survey(
        package=canonicalize_name(project["name"]),
        declared=declared,
        extra=extra,
        python=_specifier(project.get("requires-python", ""), "requires-python"),
        modules=tuple(modules),
        replaced=tuple(sorted(certain)),
        tolerated=len({use.symbol for use in replaced} - certain),
        unread=found.unread,
    )


def _project_table(root: Path) -> dict[str, Any]:
    path = root / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project")
    except FileNotFoundError as exc:
        raise UsageError(f"There is no pyproject.toml in {root.name}.", "Name the root of a Python project.") from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise UsageError(f"pyproject.toml cannot be read: {exc}.", "Correct the file.") from exc
    if not isinstance(project, dict) or not isinstance(project.get("name"), str):
        raise UsageError(
            "pyproject.toml has no [project] table with a name.",
            'Add one; fields that setup.py computes go into `dynamic`, as in dynamic = ["version", "dependencies"].',
        )
    return project


def _dependency(project: dict[str, Any]) -> tuple[SpecifierSet, str]:
    """The declared range of megatron-core, and the extra that declares it."""
    groups = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
    for extra, texts in groups.items():
        for text in texts:
            try:
                requirement = Requirement(text)
            except InvalidRequirement as exc:
                raise UsageError(
                    f"pyproject.toml: the dependency `{text}` is not a requirement.", "Correct the file."
                ) from exc
            if canonicalize_name(requirement.name) == _MEGATRON:
                return requirement.specifier, extra
    return SpecifierSet(), ""


def _specifier(text: str, key: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier as exc:
        raise UsageError(f"pyproject.toml: `{key}`: `{text}` is not a specifier.", "Write it as in >=3.10.") from exc


def _importable(root: Path, file: str) -> bool:
    """Whether a file is a module of a package of the repository, and not a script beside it."""
    parts = PurePosixPath(file).parts
    if not file.endswith(".py") or parts[-1] == "__main__.py":
        return False
    inside = parts[1:] if parts[0] == "src" else parts
    return len(inside) > 1 and (root.joinpath(*parts[: len(parts) - len(inside) + 1]) / "__init__.py").is_file()


def _tolerated(use: Use) -> bool:
    return use.guarded(*_TOLERANT)
