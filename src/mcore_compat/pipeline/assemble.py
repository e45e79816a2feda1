"""The report of a run from its plan and the results of its cells. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_compat.judge.cell import judge_expectations
from mcore_compat.judge.criteria import found
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.pipeline.run_folder import RunPlan
from mcore_compat.results import CellResult, Finding, Report, SubjectInfo
from mcore_compat.verdicts import Verdict, worst

__all__ = ["ASSEMBLED", "Exceptions", "assemble"]

_LOST = "cell-lost"
# Kinds of findings that are made here, from all cells of a run; those of a part of a run do not count for the whole.
ASSEMBLED = frozenset({_LOST, "expectation-unused"})


@dataclass(frozen=True)
class Exceptions:
    """The declared exceptions, and the cells that they may be about.

    Attributes:
        expectations: of the project.
        cells: all cells of the matrix, whether they were run or not.
    """

    expectations: Expectations
    cells: tuple[Cell, ...]


def assemble(
    plan: RunPlan,
    judged: Mapping[str, CellResult],
    subject: SubjectInfo,
    exceptions: Exceptions,
    *,
    suite: str,
    seconds: float,
    findings: tuple[Finding, ...] = (),
) -> Report:
    """The report of a run; a planned cell without a result makes it ``unproven``.

    Args:
        plan: of the run.
        judged: results by cell id.
        subject: what was judged.
        exceptions: those that nothing needs are findings.
        suite: folder of the suite, relative to the checkout.
        seconds: wall time.
        findings: about the run itself, for example about its host.
    """
    results = tuple(judged[cell_id] for cell_id in plan.planned if cell_id in judged)
    findings += judge_expectations(exceptions.expectations, exceptions.cells, results)
    findings += tuple(
        found(Verdict.UNPROVEN, _LOST, f"cell {cell_id} was planned and has no result", "Run it again.")
        for cell_id in plan.planned
        if cell_id not in judged
    )
    verdicts = [result.verdict for result in results] + [f.verdict for f in findings if f.verdict is not None]
    return Report(
        run_id=plan.run_id,
        started=plan.started,
        seconds=round(seconds, 1),
        verdict=worst(verdicts),
        subject=subject,
        suite_sha256=plan.inputs["suite"],
        suite=suite,
        profile=plan.profile,
        planned=plan.planned,
        cells=results,
        findings=findings,
    )
