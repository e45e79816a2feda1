"""Ask every cell which checks its suite would run, without running them: seconds per cell in place of minutes."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mcore_compat.errors import InfrastructureError
from mcore_compat.matrix.inventory import check_of
from mcore_compat.pipeline.session import Session
from mcore_compat.run.suite import SuiteOptions, run_suite

__all__ = ["collect"]


def collect(session: Session, say: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """Checks and how many cases each has, by cell id, from the suite's own collection in each cell.

    Raises:
        InfrastructureError: a cell has no environment, or its suite cannot be collected.
    """
    found = {}
    options = SuiteOptions(
        session.suite_folder,
        session.plan.profile,
        collect_only=True,
        subject=session.options.subject,
        package=session.lane.package,
    )
    never = threading.Event()
    for cell in session.cells:
        with session.lane.hold(cell, never, say), tempfile.TemporaryDirectory() as scratch:
            made = session.lane.provision(cell)
            if made.environment is None:
                raise InfrastructureError(f"Cell {cell.id} has no environment: {made.reason}.", made.next_step)
            seen = run_suite(cell, made.environment, options, Path(scratch, "out"), session.host, never)
        if seen.facts is None or seen.log.collection_errors or seen.finished.returncode != 0:
            why = next(iter(seen.log.collection_errors.values()), seen.facts_problem) or seen.finished.output[-400:]
            raise InfrastructureError(f"The suite cannot be collected in cell {cell.id}: {why}.", "Correct the suite.")
        found[cell.id] = dict(sorted(Counter(check_of(node) for node in seen.facts.collected).items()))
        say(f"{cell.id}: {len(found[cell.id])} checks")
    return found
