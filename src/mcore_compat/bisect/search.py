"""Binary search over a line of candidates, some of which may not be judged. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcore_compat.errors import UsageError

__all__ = ["Found", "NotBisectableError", "first_bad"]


class NotBisectableError(UsageError):
    """The ends are not good and bad, so there is nothing to find between them."""


@dataclass(frozen=True)
class Found:
    """Where it went bad.

    Attributes:
        good: the last one known to be good.
        bad: first one known to be bad.
        unknown: between them, those that could not be judged; the first bad one may be among them.
        asked: how many were judged.
    """

    good: str
    bad: str
    unknown: tuple[str, ...] = ()
    asked: int = field(default=0, compare=False)


def first_bad(line: Sequence[str], is_bad: Callable[[str], bool | None]) -> Found:
    """First bad one of a line whose first is good and whose last is bad.

    Args:
        line: at least two, oldest first. Bad is taken to stay bad.
        is_bad: True, False, or None where a candidate cannot be judged.

    Raises:
        NotBisectableError: fewer than two, or the ends are not as they should be.
    """
    if len(line) < 2:
        raise NotBisectableError("There is nothing between good and bad.", "Give two different ends.")
    known: dict[str, bool | None] = {}

    def ask(name: str) -> bool | None:
        if name not in known:
            known[name] = is_bad(name)
        return known[name]

    for name, wanted, word in ((line[0], False, "good"), (line[-1], True, "bad")):
        if ask(name) is not wanted:
            said = {True: "is bad", False: "is good", None: "cannot be judged"}[known[name]]
            raise NotBisectableError(
                f"{name} was given as {word}, but {said}.", "Give another end, or search for something else."
            )
    low, high = 0, len(line) - 1
    while high - low > 1:
        middle = (low + high) // 2
        # Nearest to the middle first; all in between may be unknown.
        order = sorted(range(low + 1, high), key=lambda place: (abs(place - middle), place))
        judged = next((place for place in order if ask(line[place]) is not None), None)
        if judged is None:
            break
        if known[line[judged]]:
            high = judged
        else:
            low = judged
    return Found(line[low], line[high], tuple(line[low + 1 : high]), len(known))
