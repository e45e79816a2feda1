"""Counts of a run over the catalogue, by kind of fault: for people, and as JSON for what sums several results up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping

from catalogue import FILES, Fault
from places import Outcome


class Tally:
    """What was planted and what became of it; a fault without an outcome was not caught."""

    def __init__(self, catalogue: Iterable[Fault], chosen: Iterable[Fault], outdated: Mapping[str, str]) -> None:
        """Start the clock.

        Args:
            catalogue: all faults that there are.
            chosen: those that were asked for.
            outdated: why some of these cannot be planted, by id.
        """
        self._all, self._chosen, self._outdated = tuple(catalogue), tuple(chosen), outdated
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Count one; from any thread."""
        with self._lock:
            self._outcomes.append(outcome)

    @property
    def green(self) -> bool:
        """Every chosen fault was caught, and no check fails without a fault."""
        return self._caught(self._chosen) == len(self._chosen) and not self._failing_controls

    @property
    def _failing_controls(self) -> list[str]:
        return [f"{o.fault.place}: {o.by}" for o in self._outcomes if not o.fault.replace and not o.caught]

    def _caught(self, faults: Iterable[Fault]) -> int:
        caught = {outcome.fault.id for outcome in self._outcomes if outcome.fault.replace and outcome.caught}
        return sum(fault.id in caught for fault in faults)

    def _kinds(self) -> dict[str, dict[str, float]]:
        kinds = {}
        for kind in FILES:
            chosen = [fault for fault in self._chosen if fault.kind == kind]
            seconds = sum(outcome.seconds for outcome in self._outcomes if outcome.fault.kind == kind)
            kinds[kind] = {
                "planted": len(chosen),
                "caught": self._caught(chosen),
                "left_out": sum(fault.kind == kind for fault in self._all) - len(chosen),
                "seconds": round(seconds, 1),
            }
        return kinds

    def text(self) -> str:
        """The closing table; what was not caught stands below it once more, by name."""
        rows = [f"\n{'kind':9}  {'planted':>7}  {'caught':>6}  {'left out':>8}  {'s':>6}"]
        rows += [
            f"{kind:9}  {row['planted']:7}  {row['caught']:6}  {row['left_out']:8}  {row['seconds']:6.1f}"
            for kind, row in self._kinds().items()
        ]
        controls = [outcome for outcome in self._outcomes if not outcome.fault.replace]
        rows.append(f"{'(control)':9}  {len(controls):7}  {'':6}  {'':8}  {sum(o.seconds for o in controls):6.1f}")
        rows += [f"NOT PLANTED: {problem}" for problem in self._outdated.values()]
        rows += [f"CONTROL FAILS: {name}" for name in self._failing_controls]
        missed = [outcome for outcome in self._outcomes if outcome.fault.replace and not outcome.caught]
        rows += [f"NOT CAUGHT: {outcome.fault.id}: {outcome.by}" for outcome in missed]
        left = len(self._all) - len(self._chosen)
        rows.append(
            f"\n{self._caught(self._chosen)} of {len(self._chosen)} faults caught"
            + (f", {left} more were not asked for" if left else "")
            + f", {time.monotonic() - self._started:.0f} s"
        )
        return "\n".join(rows)

    def as_json(self) -> str:
        """``caught``, ``planted``, ``left_out``, ``failing_controls``, ``seconds``, and the same by kind."""
        return json.dumps(
            {
                "planted": len(self._chosen),
                "caught": self._caught(self._chosen),
                "left_out": len(self._all) - len(self._chosen),
                "failing_controls": self._failing_controls,
                "seconds": round(time.monotonic() - self._started, 1),
                "kinds": self._kinds(),
            },
            indent=1,
        )
