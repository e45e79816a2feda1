"""What a project says of itself: the table ``[tool.mcore-compat]`` of its ``pyproject.toml``, or ``mcore-compat.toml``.

Everything has a default. A project without settings is one that keeps its files in ``compat_matrix/``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mcore_compat import versions
from mcore_compat.errors import UsageError

__all__ = ["FILE", "TABLE", "Releases", "Settings", "load_settings", "package_name"]

FILE = "mcore-compat.toml"
TABLE = "mcore-compat"

_Place = Annotated[str, Field(min_length=1, description="a path, relative to the project's root")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Releases(_Model):
    """A matrix without a file of its own: releases whose needs are known, as this project's matrix has them.

    Attributes:
        releases: exact versions, or one specifier such as ``>=0.16,<0.20`` over the releases that are known.
        python: the interpreter of every cell, major and minor; None: that of the known matrix.
        torch: exact version for every cell; None: that of the known matrix.
        requirements: further requirements of every cell, for tests.
        time_limit_s: seconds after which a cell's processes are killed.
    """

    releases: tuple[str, ...] | str
    python: Annotated[str | None, Field(pattern=r"^3\.\d+$")] = None
    torch: str | None = None
    requirements: tuple[str, ...] = ()
    time_limit_s: Annotated[int | None, Field(ge=10, le=7200)] = None

    @field_validator("releases")
    @classmethod
    def _readable(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(value, str):
            try:
                SpecifierSet(value)
            except InvalidSpecifier as exc:
                raise ValueError(f"`{value}` is not a specifier; write it as in >=0.16,<0.20") from exc
        elif unknown := [text for text in value if versions.parse(text) is None]:
            raise ValueError(f"`{unknown[0]}` is not a version; write it as in 0.18.2")
        elif not value:
            raise ValueError("it names no release")
        return value

    @property
    def specifier(self) -> SpecifierSet | None:
        """The specifier, where the releases are not listed."""
        return SpecifierSet(self.releases) if isinstance(self.releases, str) else None


class Settings(_Model):
    """The settings of one project.

    Attributes:
        matrix: a file of cells, or a table of releases; None: ``compat_matrix/matrix.toml``.
        suite: folder of the tests.
        inventory: file of the declared checks; None: nothing is declared, and whatever is collected is judged.
        expectations: file of the declared failures; None: there are none.
        package: install the project's own package in every cell.
        extras: of its optional dependencies, those that are installed.
        editable: read its modules from the project's folder in place of a wheel's.
        wheelhouse: folder of wheels that everything comes from; no index is asked then.
        subject: an implementation of the fused forward that the suite judges; None: the suite is an ordinary one.
        title: the project's name in reports; None: that of its package.
        links: texts with addresses that every report shows.
        rerun: the sentence that says how a failed check is run again, with ``{cell}``, ``{check}`` and ``{python}``;
            None: the command that runs it in the cell's interpreter.
    """

    matrix: _Place | Releases | None = None
    suite: _Place = "tests/compat"
    inventory: _Place | None = None
    expectations: _Place | None = None
    package: bool = True
    extras: tuple[str, ...] = ()
    editable: bool = False
    wheelhouse: _Place | None = None
    subject: str | None = None
    title: Annotated[str | None, Field(min_length=1, max_length=80)] = None
    links: Mapping[str, Annotated[str, Field(pattern=r"^https://")]] = {}
    rerun: str | None = None

    @model_validator(mode="after")
    def _rerun_is_a_template(self) -> Self:
        if self.rerun is not None:
            try:
                self.rerun.format(cell="", check="", python="")
            except (KeyError, IndexError, ValueError) as exc:
                raise ValueError(
                    f"`rerun` has an unknown placeholder ({exc}); use {{cell}}, {{check}}, {{python}}"
                ) from exc
        return self


_KEYS = {*Settings.model_fields, *Releases.model_fields}


def load_settings(root: Path) -> Settings | None:
    """The settings of the project at ``root``; None: it has none.

    Raises:
        UsageError: a file is not TOML, a key is wrong, or both files have settings.
    """
    own = _toml(root / FILE)
    table = (_toml(root / "pyproject.toml") or {}).get("tool", {}).get(TABLE)
    if own is not None and table is not None:
        raise UsageError(f"Both {FILE} and [tool.{TABLE}] of pyproject.toml have settings.", "Keep one of them.")
    data, place = (own, FILE) if own is not None else (table, f"pyproject.toml, [tool.{TABLE}]")
    if data is None:
        return None
    try:
        return Settings.model_validate(data)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        # Of a key with several forms, what a validator of this file says comes first.
        first = next((error for error in errors if error["type"] == "value_error"), errors[0])
        key = ".".join(str(part) for part in first["loc"] if str(part) in _KEYS) or "the whole table"
        known = ", ".join(Settings.model_fields)
        remedy = f"The keys are: {known}." if first["type"] == "extra_forbidden" else "Correct it."
        raise UsageError(f"{place}: `{key}`: {first['msg'].removeprefix('Value error, ')}.", remedy) from exc


def package_name(root: Path) -> str | None:
    """The normalised name of the package that the ``pyproject.toml`` of ``root`` declares; None: it declares none.

    Raises:
        UsageError: the file is not TOML.
    """
    project = (_toml(root / "pyproject.toml") or {}).get("project")
    name = project.get("name") if isinstance(project, dict) else None
    return canonicalize_name(name) if isinstance(name, str) else None


def _toml(path: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise UsageError(f"{path.name} cannot be read: {exc}.", "Correct the file.") from exc
