"""The verdict of a cell and of a run, and the exit codes that stand for them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum

__all__ = ["ExitCode", "Verdict", "exit_code", "worst"]


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
    def meaning(self) -> str:
        """One line for people."""
        return _MEANINGS[self]


class ExitCode(IntEnum):
    """Exit codes of every command."""

    GREEN = 0
    BREAK = 1
    USAGE = 2
    COULD_NOT_JUDGE = 3


_MEANINGS = {
    Verdict.OK: "every declared check ran and passed",
    Verdict.DRIFT: "upstream's surface moved, behaviour is equal",
    Verdict.BREAK: "a check failed",
    Verdict.UNRESOLVABLE: "no environment with these requirements can be made",
    Verdict.INFRA: "the environment is not what was asked for, or the host failed",
    Verdict.UNPROVEN: "declared checks did not run, or left no evidence",
}
# A break is knowledge, the others are the lack of it; so a break comes first.
_ORDER = (Verdict.BREAK, Verdict.UNPROVEN, Verdict.INFRA, Verdict.UNRESOLVABLE, Verdict.DRIFT, Verdict.OK)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a run from those of its cells; a run without cells proves nothing."""
    found = set(verdicts)
    return next((verdict for verdict in _ORDER if verdict in found), Verdict.UNPROVEN)


def exit_code(verdict: Verdict) -> ExitCode:
    """The exit code that a run with this verdict ends with."""
    if verdict.green:
        return ExitCode.GREEN
    return ExitCode.BREAK if verdict is Verdict.BREAK else ExitCode.COULD_NOT_JUDGE
