"""Expected failures and skips: each with its reason, link and expiry, and each wrong in itself once it is stale.

Read from ``compat_matrix/expectations.toml``.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mcore_compat.errors import ExpectationError
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.toml_file import DataModel, load_model

__all__ = ["Expectation", "Expectations", "load_expectations"]


class Expectation(DataModel):
    """One declared exception.

    Attributes:
        cell: shell pattern over cell ids.
        check: the check's id.
        kind: ``fail``: it must fail; ``skip``: it must be skipped.
        failure: which failure is meant: a regular expression that the message of every failing case contains. Required
            for ``fail``; a skip has none.
        expires: the day from which this entry turns its cells red, so that somebody looks again.
    """

    cell: Annotated[str, Field(min_length=1)]
    check: Annotated[str, Field(pattern=r"^[\w/.-]+\.py(::\w+)+$")]
    kind: Literal["fail", "skip"]
    failure: Annotated[str | None, Field(min_length=8)] = None
    reason: Annotated[str, Field(min_length=10)]
    link: Annotated[str, Field(pattern=r"^https://")]
    expires: dt.date

    @model_validator(mode="after")
    def _says_which_failure(self) -> Self:
        if (self.failure is not None) is (self.kind == "skip"):
            raise ValueError(
                "an expected failure says which one it is, and a skip has none"
                " | give `failure` for kind `fail` only: a regular expression for its message"
            )
        try:
            re.compile(self.failure or "")
        except re.error as error:
            raise ValueError(f"`failure` is not a regular expression: {error} | correct it") from error
        return self

    def is_meant(self, message: str) -> bool:
        """Whether this is the failure that the entry is about."""
        return self.failure is not None and re.search(self.failure, message) is not None

    def covers(self, cell: Cell) -> bool:
        """Whether it speaks of this cell."""
        return fnmatch.fnmatchcase(cell.id, self.cell)

    def expired(self, today: dt.date) -> bool:
        """Whether it has run out."""
        return today >= self.expires

    def __str__(self) -> str:
        return f"expectation ({self.cell}, {self.check}, {self.kind})"


class Expectations(DataModel):
    """``expectations.toml``."""

    schema_version: Literal[1]
    expectation: tuple[Expectation, ...] = Field(default=(), strict=False)

    def of(self, cell: Cell) -> tuple[Expectation, ...]:
        """Those that speak of this cell."""
        return tuple(entry for entry in self.expectation if entry.covers(cell))

    def about(self, checks: Container[str]) -> Expectations:
        """Those that speak of these checks: one file serves suites of different checks."""
        kept = tuple(entry for entry in self.expectation if entry.check in checks)
        return self.model_copy(update={"expectation": kept})

    def without_cell(self, cells: Iterable[Cell]) -> tuple[Expectation, ...]:
        """Those that speak of no cell of the matrix at all."""
        known = tuple(cells)
        return tuple(entry for entry in self.expectation if not any(entry.covers(cell) for cell in known))


def load_expectations(path: Path) -> Expectations:
    """Read and validate ``expectations.toml``.

    Raises:
        ExpectationError: the file is missing, is not TOML, or is not a valid list.
    """
    return load_model(path, Expectations, ExpectationError)
