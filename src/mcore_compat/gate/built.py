"""Both sides of a gate are built before anything runs, and stay the ones that were built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.lanes import Lane
from mcore_compat.provision.uv_environment import is_unchanged
from mcore_compat.records import Package, ProjectWheel, Provisioned
from mcore_compat.results import Finding
from mcore_compat.verdicts import Verdict

__all__ = ["BuiltLane", "build_all"]


@dataclass(frozen=True)
class BuiltLane:
    """A lane whose environments were made before.

    Another gate may replace an environment of the same name between two steps of this one. So whoever asks for one
    holds it and gets it verified, and made again if it is not the one that was built.

    Attributes:
        lane: makes them.
        made: what became of each cell, by id.
        host: the caller's environment variables.
    """

    lane: Lane
    made: Mapping[str, Provisioned]
    host: Mapping[str, str]

    @property
    def wheel(self) -> ProjectWheel:
        """See :class:`Lane`."""
        return self.lane.wheel

    @property
    def package(self) -> Package | None:
        """See :class:`Lane`."""
        return self.lane.package

    @property
    def environments(self) -> Path:
        """See :class:`Lane`."""
        return self.lane.environments

    @property
    def roots(self) -> Mapping[str, Path]:
        """See :class:`Lane`."""
        return self.lane.roots

    def adapted(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """See :class:`Lane`."""
        return self.lane.adapted(cells)

    def hold(self, cell: Cell, cancel: threading.Event, say: Callable[[str], None]) -> AbstractContextManager[bool]:
        """See :class:`Lane`."""
        return self.lane.hold(cell, cancel, say)

    def provision(self, cell: Cell) -> Provisioned:
        """What was built, if it is still there; a side that could not be built leaves the other one without a run."""
        made = self.made[cell.id]
        refused = next((other for other in self.made.values() if other.environment is None), None)
        if made.environment is None:
            return made
        if refused is not None:
            reason = f"not run, since the other side has no environment: {refused.reason}"
            return Provisioned(made.seconds, None, Verdict.INFRA, reason, refused.next_step)
        return made if is_unchanged(cell, made.environment, self.host) else self.lane.provision(cell)

    def rerun(self, cell: Cell, check: str) -> str:
        """See :class:`Lane`."""
        return self.lane.rerun(cell, check)

    def host_findings(self) -> tuple[Finding, ...]:
        """See :class:`Lane`."""
        return self.lane.host_findings()


def build_all(lane: Lane, cells: Sequence[Cell], host: Mapping[str, str], say: Callable[[str, str], None]) -> BuiltLane:
    """Make the environments of all cells.

    Args:
        lane: makes them.
        cells: as the matrix or the gate has them.
        host: the caller's environment variables.
        say: called with a cell's id and what is done.

    Raises:
        LockTimeoutError: another run keeps an environment for too long.
    """
    made = {}
    never = threading.Event()
    for cell in lane.adapted(cells):
        with lane.hold(cell, never, lambda text, cell=cell: say(cell.id, text)):  # type: ignore[misc]
            say(cell.id, "environment")
            made[cell.id] = lane.provision(cell)
    return BuiltLane(lane, made, host)
