"""Declared exceptions: each silences findings with a reason until a day, and is wrong in itself once it is stale."""

from __future__ import annotations

import datetime as dt
import fnmatch
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mcore_compat.errors import ExpectationError
from mcore_compat.matrix.toml_file import DataModel, load_model
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.matrix import UsageReport

__all__ = ["UsageExpectation", "UsageExpectations", "apply_expectations", "load_usage_expectations"]


class UsageExpectation(DataModel):
    """One exception.

    Attributes:
        symbol: shell pattern over upstream symbols.
        file: shell pattern over the adopter's files.
        against: shell pattern over the labels of Megatrons.
        rule: of the finding; all rules where empty.
        expires: the day from which it counts as stale.
    """

    symbol: Annotated[str, Field(min_length=1)]
    file: str = "*"
    against: str = "*"
    rule: str = ""
    reason: Annotated[str, Field(min_length=10)]
    expires: dt.date

    def covers(self, finding: UsageFinding) -> bool:
        """Whether it speaks of this finding."""
        return (
            fnmatch.fnmatchcase(finding.symbol, self.symbol)
            and fnmatch.fnmatchcase(finding.file, self.file)
            and fnmatch.fnmatchcase(finding.against, self.against)
            and self.rule in {"", finding.rule}
        )

    def __str__(self) -> str:
        return f"expectation ({self.symbol}, {self.file}, {self.against})"


class UsageExpectations(DataModel):
    """The file.

    Attributes:
        include: folders of the source that the gate reads; everything but its tests where empty.
    """

    schema_version: Literal[1]
    include: tuple[str, ...] = Field(default=(), strict=False)
    expectation: tuple[UsageExpectation, ...] = Field(default=(), strict=False)


def load_usage_expectations(path: Path) -> UsageExpectations:
    """Read the file.

    Raises:
        ExpectationError: it is missing or not such a list.
    """
    return load_model(path, UsageExpectations, ExpectationError)


def apply_expectations(report: UsageReport, expected: UsageExpectations, today: dt.date) -> UsageReport:
    """The report with covered findings marked, and the stale entries named.

    An entry about Megatrons that are not in the report cannot be stale by covering nothing.
    """
    labels = [column.label for column in report.columns]
    live = [entry for entry in expected.expectation if today < entry.expires]
    stale = [f"{entry} expired on {entry.expires}." for entry in expected.expectation if entry not in live]
    used: set[int] = set()

    def marked(finding: UsageFinding) -> UsageFinding:
        for index, entry in enumerate(live):
            if entry.covers(finding):
                used.add(index)
                return replace(finding, expected=entry.reason)
        return finding

    columns = tuple(
        replace(column, findings=tuple(marked(finding) for finding in column.findings)) for column in report.columns
    )
    stale += [
        f"{entry} covers no finding."
        for index, entry in enumerate(live)
        if index not in used and any(fnmatch.fnmatchcase(label, entry.against) for label in labels)
    ]
    return replace(report, columns=columns, stale=tuple(stale))
