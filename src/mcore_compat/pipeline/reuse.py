"""Cached results of earlier runs: reused if nothing that they depend on has changed, and checked by sampling.

Only with ``--reuse``, never by default. Only passing results are cached, under a digest of everything that decides
them: the cell, its environment as it was just verified, the project's wheel (the judge is in it), the suite, the
declared checks and exceptions, profile, workers, the host's variables and machine. Every run re-runs some cells all
the same; if one of them differs from its cached result, the run does not pass.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.files.atomic import write_atomically
from mcore_compat.judge.criteria import found
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.records import Environment
from mcore_compat.results import CellResult, Finding
from mcore_compat.verdicts import Verdict

__all__ = ["CachedResult", "ResultCache", "cache_key", "mismatch", "reused_result", "sample"]

# Raised when what a result depends on is put together in another way.
_GENERATION = 1
# One cell in ten is re-run.
_SHARE = 10


class CachedResult(BaseModel):
    """One cached result.

    Attributes:
        run_id: of the run that judged it.
        result: a passing one, as it was written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    result: CellResult


@dataclass(frozen=True)
class ResultCache:
    """The cached results, one file per digest.

    Attributes:
        folder: beside the environments.
    """

    folder: Path

    def find(self, key: str) -> CachedResult | None:
        """The passing result under this digest, or None if there is no readable one."""
        try:
            kept = CachedResult.model_validate_json((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None
        return kept if kept.result.verdict is Verdict.OK else None

    def keep(self, key: str, kept: CachedResult) -> None:
        """Write a passing result atomically; any other is not cached. A full disk only costs the cached result."""
        if kept.result.verdict is not Verdict.OK:
            return
        with contextlib.suppress(OSError):
            write_atomically(self.folder / f"{key}.json", kept.model_dump_json(indent=1))

    def forget(self, key: str) -> None:
        """Remove a result that a re-run did not confirm."""
        (self.folder / f"{key}.json").unlink(missing_ok=True)


def cache_key(
    cell: Cell,
    environment: Environment,
    inputs: Mapping[str, str],
    options: Mapping[str, str | int],
    expectations: Expectations,
    host: Mapping[str, str],
    today: dt.date,
) -> str:
    """Digest of everything that a cell's result depends on.

    Args:
        cell: as the matrix has it.
        environment: verified a moment ago: every distribution's version, and the hashes of megatron-core's and the
            subject's files.
        inputs: digests of subject, suite and data files, by name.
        options: profile and workers.
        expectations: those that have run out change the verdict from one day to the next.
        host: the caller's environment; what a cell gets of it counts.
        today: decides which exceptions have run out.
    """
    nowhere = Path("/")
    facts = environment.facts.model_dump(mode="json", exclude={"seconds": True, "imported": {"seconds"}})
    decisive = {
        "generation": _GENERATION,
        "cell": cell.model_dump(mode="json"),
        "facts": facts,
        "lock": environment.lock,
        # The matrix decides through the cell: another cell's line in it does not.
        "inputs": {name: digest for name, digest in inputs.items() if name != "matrix"},
        "options": dict(options),
        "expired": [entry.expired(today) for entry in expectations.of(cell)],
        "host": cell_environment(host, cell, home=nowhere, temporary=nowhere),
        "machine": [platform.machine(), platform.release()],
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def sample(run_id: str, cells: Iterable[str]) -> frozenset[str]:
    """The cells that are re-run in this run: one in ten, at least one, others in every run."""
    order = sorted(cells, key=lambda cell_id: hashlib.sha256(f"{run_id}\0{cell_id}".encode()).digest())
    return frozenset(order[: -(-len(order) // _SHARE)])


def reused_result(kept: CachedResult, provision: float) -> CellResult:
    """An earlier result as one of this run, with a note that says so."""
    note = Finding(
        kind="reused",
        message=f"judged in run {kept.run_id}, with the same environment, subject, suite and data",
        next_step="None; without --reuse the cell is run again.",
    )
    result = kept.result
    seconds = result.seconds.model_copy(update={"provision": round(provision, 1), "imports": 0.0, "suite": 0.0})
    return result.model_copy(
        update={"reused_from": kept.run_id, "seconds": seconds, "findings": (*result.findings, note)}
    )


def mismatch(kept: CachedResult, fresh: CellResult) -> CellResult | None:
    """The fresh result with a finding about the difference, or None if it agrees with the cached one."""
    old, new = _outcomes(kept.result), _outcomes(fresh)
    if old == new and fresh.mode == kept.result.mode:
        return None
    differing = sorted({check for check, _ in old.items() ^ new.items()})
    what = ", ".join(differing[:4]) or f"mode {kept.result.mode}, now {fresh.mode}"
    finding = found(
        Verdict.UNPROVEN,
        "reuse-refuted",
        f"run {kept.run_id} had another result for this cell, with the same inputs: {what}",
        "Run again without --reuse: a check here does not depend on its inputs alone, so cached results do not count.",
    )
    verdict = fresh.verdict if not fresh.verdict.green else Verdict.UNPROVEN
    reason = fresh.reason if not fresh.verdict.green else finding.message
    return fresh.model_copy(update={"verdict": verdict, "reason": reason, "findings": (finding, *fresh.findings)})


def _outcomes(result: CellResult) -> dict[str, str]:
    return {check.check: check.outcome for check in result.results}
