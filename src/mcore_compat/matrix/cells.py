"""The matrix: which megatron-core is judged, with which torch, where, and what is expected of it.

Read from ``compat_matrix/matrix.toml``; every departure from the defaults carries its reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import AfterValidator, Field, field_validator, model_validator

from mcore_compat import versions
from mcore_compat.errors import MatrixError
from mcore_compat.matrix.source import installable_source
from mcore_compat.matrix.toml_file import DataModel, LocatedError, load_model

__all__ = [
    "PREDICTED",
    "Cell",
    "Matrix",
    "Mode",
    "ReasonedFlag",
    "ReasonedRequirement",
    "ReasonedVariable",
    "load_matrix",
]

Mode = Literal["hook", "legacy"]
Lane = Literal["cpu", "gpu"]
Reason = Annotated[str, Field(min_length=10, description="why this is needed, for the next reader")]
Python = Annotated[str, Field(pattern=r"^3\.\d+$", description="the interpreter, major and minor")]
TimeLimit = Annotated[int, Field(ge=10, le=7200, description="seconds after which the cell's processes are killed")]
Link = Annotated[str | None, Field(description="where the fact can be read", pattern=r"^https://")]

# Tag of a cell whose expected mode was read from a source that no release has: what runs may correct it.
PREDICTED = "predicted"
_CELL_ID = re.compile(r"[a-z0-9][a-z0-9.+_-]*")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as exc:
        raise ValueError(f"`{text}` is not a requirement | write it as in `numpy<2.5`") from exc
    return text


def _torch_version(text: str) -> str:
    if versions.parse(text) is None:
        raise ValueError(f"`{text}` is not a torch version | give an exact version such as 2.11.0")
    return text


Torch = Annotated[str, AfterValidator(_torch_version), Field(description="exact version")]


class ReasonedRequirement(DataModel):
    """A requirement or constraint beyond the common ones."""

    spec: Annotated[str, Field(description="a PEP 508 requirement")]
    reason: Reason
    link: Link = None

    _check = field_validator("spec")(_requirement)


class ReasonedVariable(DataModel):
    """An environment variable that the cell's processes get."""

    name: str
    value: str
    reason: Reason
    link: Link = None

    @field_validator("name")
    @classmethod
    def _upper_case(cls, name: str) -> str:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"`{name}` is not a variable name | use capitals, digits and underscores")
        return name


class ReasonedFlag(DataModel):
    """A permission that is off by default."""

    value: bool
    reason: Reason
    link: Link = None


class CellFields(DataModel):
    """What a cell says of itself, in the file and after the defaults are filled in.

    Attributes:
        id: stable name, used for folders, selection and reports.
        megatron_core: the version asked for; a label where ``source`` is given.
        source: what is installed instead of the release on the index: a wheel, an sdist, a folder or a ``git+…`` URL,
            with or without ``megatron-core @`` before it; a relative path starts at the file's folder.
        expected_mode: the installation that a fused forward must choose here by itself; None: not declared, as in the
            matrix of a suite that judges no fused forward.
        without_dependencies: packages that are installed by themselves, for a part that needs nothing more.
    """

    id: str
    megatron_core: str
    source: str | None = None
    expected_mode: Mode | None = None
    tags: tuple[str, ...] = Field(default=(), strict=False)
    requirements: tuple[ReasonedRequirement, ...] = Field(default=(), strict=False)
    without_dependencies: tuple[ReasonedRequirement, ...] = Field(default=(), strict=False)
    constraints: tuple[ReasonedRequirement, ...] = Field(default=(), strict=False)
    env: tuple[ReasonedVariable, ...] = Field(default=(), strict=False)
    allow_sdist: ReasonedFlag | None = None

    @field_validator("id")
    @classmethod
    def _safe_id(cls, value: str) -> str:
        if not _CELL_ID.fullmatch(value):
            raise ValueError(f"`{value}` is not a cell id | use lower-case letters, digits, dots, dashes, underscores")
        return value

    @field_validator("source")
    @classmethod
    def _installable(cls, value: str | None) -> str | None:
        if value is not None:
            installable_source(value, Path("/"))
        return value

    @model_validator(mode="after")
    def _version_is_one(self) -> Self:
        if self.source is None and versions.parse(self.megatron_core) is None:
            raise ValueError(
                f"`{self.megatron_core}` is not a version of megatron-core | give an exact version such as 0.18.2"
            )
        return self


class Cell(CellFields):
    """One megatron-core in one environment.

    Attributes:
        contract_class: computed from the committed contracts, never written in the file; "" until that is done
            (:func:`mcore_compat.contract.rules.classes.load_classified_matrix`). Pull requests run one cell of each.
    """

    contract_class: str = ""
    python: Python
    torch: Torch
    lane: Lane
    time_limit_s: TimeLimit

    @property
    def builds_megatron(self) -> bool:
        """Whether megatron-core may be built from source here."""
        return self.source is not None or (self.allow_sdist is not None and self.allow_sdist.value)

    @property
    def megatron_requirement(self) -> str:
        """What the installer is asked for."""
        return self.source if self.source is not None else f"megatron-core=={self.megatron_core}"

    @property
    def all_tags(self) -> frozenset[str]:
        """Declared tags, and those that follow from the cell itself."""
        mode = () if self.expected_mode is None else (self.expected_mode,)
        return frozenset({*self.tags, self.lane, self.id, *mode})


class Defaults(DataModel):
    """What every cell has unless it says otherwise.

    Attributes:
        fused_forward: the cells judge a fused forward, so that each says which mode is expected; false for the matrix
            of an ordinary suite.
    """

    fused_forward: bool = True
    python: Python
    torch: Torch
    lane: Lane = "cpu"
    time_limit_s: TimeLimit = 600
    requirements: tuple[str, ...] = Field(default=(), strict=False, description="what the property suite needs")
    constraints: tuple[ReasonedRequirement, ...] = Field(default=(), strict=False)

    @field_validator("requirements")
    @classmethod
    def _all_requirements(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_requirement(value) for value in values)


class CellEntry(CellFields):
    """A cell as written in the file: what is left out comes from the defaults."""

    python: Python | None = None
    torch: Torch | None = None
    lane: Lane | None = None
    time_limit_s: TimeLimit | None = None

    def completed(self, defaults: Defaults) -> Cell:
        """The cell with the defaults filled in."""
        given = self.model_dump(exclude_none=True, exclude={"constraints"})
        merged = {name: getattr(defaults, name) for name in ("python", "torch", "lane", "time_limit_s")} | given
        constraints = [item.model_dump() for item in (*defaults.constraints, *self.constraints)]
        return Cell.model_validate({**merged, "constraints": constraints})


class MatrixFile(DataModel):
    """``matrix.toml`` itself; its JSON Schema is committed beside it."""

    schema_version: Literal[1]
    defaults: Defaults
    cell: tuple[CellEntry, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _no_duplicates(self) -> Self:
        seen: dict[str, int] = {}
        for number, entry in enumerate(self.cell):
            if entry.id in seen:
                raise LocatedError(
                    f"cell id `{entry.id}` is used twice, by cells {seen[entry.id] + 1} and {number + 1} of the file"
                    " | give each cell its own id",
                    ("cell", number, "id"),
                )
            seen[entry.id] = number
            if self.defaults.fused_forward and entry.expected_mode is None:
                raise LocatedError(
                    f"missing key `expected_mode` of cell `{entry.id}` | add it; or set `fused_forward = false` in"
                    " [defaults], for a suite that judges no fused forward",
                    ("cell", number, "expected_mode"),
                )
        recipes: dict[str, str] = {}
        for number, entry in enumerate(self.cell):
            recipe = entry.model_dump_json(exclude={"id", "expected_mode", "tags", "time_limit_s"})
            if recipe in recipes:
                raise LocatedError(
                    f"cells `{recipes[recipe]}` and `{entry.id}` ask for the same environment and differ in name only"
                    " | remove one of them",
                    ("cell", number, "id"),
                )
            recipes[recipe] = entry.id
        for entry in self.cell:
            entry.completed(self.defaults)
        return self


class Matrix(DataModel):
    """The validated matrix.

    Attributes:
        python: interpreter of the cells that name none.
        requirements: what every cell's suite needs.
    """

    python: Python
    requirements: tuple[str, ...]
    cells: tuple[Cell, ...]

    def cell(self, cell_id: str) -> Cell | None:
        """The cell of this id, or None."""
        return next((cell for cell in self.cells if cell.id == cell_id), None)


def load_matrix(path: Path) -> Matrix:
    """Read and validate ``matrix.toml``.

    Raises:
        MatrixError: the file is missing, is not TOML, or is not a valid matrix.
    """
    file = load_model(path, MatrixFile, MatrixError)
    cells = (entry.completed(file.defaults) for entry in file.cell)
    return Matrix(
        python=file.defaults.python,
        requirements=file.defaults.requirements,
        cells=tuple(_placed(cell, path.parent) for cell in cells),
    )


def _placed(cell: Cell, folder: Path) -> Cell:
    """The cell with its source in the installer's form."""
    if cell.source is None:
        return cell
    return cell.model_copy(update={"source": installable_source(cell.source, folder)})
