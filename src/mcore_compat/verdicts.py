"""The verdict of a cell and of a run, and the exit codes that stand for them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Literal

__all__ = ["LEVELS", "ExitCode", "Level", "Verdict", "exit_code", "level_of", "rank_in_cell", "severity", "worst"]

Level = Literal["break", "unproven", "drift", "info"]
# How much a finding weighs, worst first.
LEVELS: tuple[Level, ...] = ("break", "unproven", "drift", "info")
Severity = Literal["error", "warning", "note"]


class Verdict(StrEnum):
    """What is known about one megatron-core. Only ``ok`` and ``drift`` are green."""

    OK = "ok"
    DRIFT = "drift"
    BREAK = "break"
    UNRESOLVABLE = "unresolvable"
    INFRA = "infra"
    UNPROVEN = "unproven"

    @property
    def green(self) -> bool:
        """Whether an upgrade may go ahead on this verdict."""
        return self in {Verdict.OK, Verdict.DRIFT}

    @property
    def label(self) -> str:
        """The verdict, and beside it what it is commonly called."""
        return f"{self.value} ({_COMMON[self]})" if self in _COMMON else self.value

    @property
    def meaning(self) -> str:
        """One line for people."""
        return _MEANINGS[self]


class ExitCode(IntEnum):
    """Exit codes of every command."""

    GREEN = 0
    BREAK = 1
    USAGE = 2
    COULD_NOT_JUDGE = 3


_COMMON = {
    Verdict.DRIFT: "works, upstream changed",
    Verdict.BREAK: "failed",
    Verdict.UNRESOLVABLE: "cannot be installed",
    Verdict.INFRA: "environment error",
    Verdict.UNPROVEN: "inconclusive",
}
_MEANINGS = {
    Verdict.OK: "every declared check ran and passed",
    Verdict.DRIFT: "upstream's surface moved, behaviour is equal",
    Verdict.BREAK: "a check failed",
    Verdict.UNRESOLVABLE: "no environment with these requirements can be made",
    Verdict.INFRA: "the environment is not what was asked for, or the host failed",
    Verdict.UNPROVEN: "declared checks did not run, or left no evidence",
}
# In a run a break comes first: it is knowledge, the others are the lack of it.
_RUN_ORDER = (Verdict.BREAK, Verdict.UNPROVEN, Verdict.INFRA, Verdict.UNRESOLVABLE, Verdict.DRIFT, Verdict.OK)
# In a cell the environment comes first: failures in the wrong environment mean nothing.
_CELL_ORDER = (Verdict.UNRESOLVABLE, Verdict.INFRA, Verdict.BREAK, Verdict.UNPROVEN, Verdict.DRIFT, Verdict.OK)
# Verdicts that are not listed here say that something was not proved.
_LEVELS: dict[Verdict | None, Level] = {
    Verdict.BREAK: "break",
    Verdict.DRIFT: "drift",
    Verdict.OK: "info",
    None: "info",
}
_SEVERITIES: dict[Level, Severity] = {"break": "error", "unproven": "error", "drift": "warning", "info": "note"}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a run from those of its cells; a run without cells proves nothing."""
    found = set(verdicts)
    return next((verdict for verdict in _RUN_ORDER if verdict in found), Verdict.UNPROVEN)


def rank_in_cell(verdict: Verdict | None) -> int:
    """Place of a finding among those of its cell, worst first; the first one decides. None is a note and comes last."""
    return _CELL_ORDER.index(verdict if verdict is not None else Verdict.OK)


def level_of(verdict: Verdict | None) -> Level:
    """The level of a finding that alone would make ``verdict`` of its cell; None is a note."""
    return _LEVELS.get(verdict, "unproven")


def severity(level: Level) -> Severity:
    """The level in the words of code scanners and CI annotations."""
    return _SEVERITIES[level]


def exit_code(verdict: Verdict) -> ExitCode:
    """The exit code that a run with this verdict ends with."""
    if verdict.green:
        return ExitCode.GREEN
    return ExitCode.BREAK if verdict is Verdict.BREAK else ExitCode.COULD_NOT_JUDGE
