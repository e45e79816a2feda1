"""Asks every cell which checks its suite would run, without running them: minutes become seconds a cell."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from mcore_compat.errors import InfrastructureError
from mcore_compat.matrix.inventory import check_of
from mcore_compat.pipeline.session import Prepared
from mcore_compat.provision.uv_environment import provision
from mcore_compat.run.suite import SuiteOptions, run_suite

__all__ = ["collect"]


def collect(run: Prepared, say: Callable[[str], None]) -> dict[str, list[str]]:
    """Check ids by cell id, from the suite's own collection in each cell.

    Raises:
        InfrastructureError: a cell has no environment, or its suite cannot be collected.
    """
    config, found = run.config, {}
    options = SuiteOptions(config.suite, run.plan.profile, collect_only=True)
    for cell in run.cells:
        with FileLock(config.cells / f"{cell.id}.lock"), tempfile.TemporaryDirectory() as scratch:
            made = provision(
                cell, run.matrix.requirements, run.subject, config.cells, run.uv, run.interpreters[cell.python],
                run.host,
            )  # fmt: skip
            if made.environment is None:
                raise InfrastructureError(f"Cell {cell.id} has no environment: {made.reason}.", made.next_step)
            seen = run_suite(cell, made.environment, options, Path(scratch, "out"), run.host, threading.Event())
        if seen.facts is None or seen.log.collection_errors or seen.finished.returncode != 0:
            why = next(iter(seen.log.collection_errors.values()), seen.facts_problem) or seen.finished.output[-400:]
            raise InfrastructureError(f"The suite cannot be collected in cell {cell.id}: {why}.", "Correct the suite.")
        found[cell.id] = sorted({check_of(node) for node in seen.facts.collected})
        say(f"{cell.id}: {len(found[cell.id])} checks")
    return found
