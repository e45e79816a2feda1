"""The question that a run or a gate was asked, and its answer in words: the first thing in every format. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_compat.gate.model import GateReport, Side
from mcore_compat.report.causes import Cause
from mcore_compat.results import Report
from mcore_compat.verdicts import Verdict

__all__ = ["Answer", "answer_of_gate", "answer_of_run", "counted", "short_name"]

_GATE_ANSWERS = {
    Verdict.OK: "Yes.",
    Verdict.DRIFT: "Yes, after reading what changed.",
    Verdict.BREAK: "No.",
    Verdict.UNRESOLVABLE: "Not known: the candidate cannot be installed.",
    Verdict.INFRA: "Not known: this host or the environment failed.",
    Verdict.UNPROVEN: "Not known: the result is inconclusive.",
}


@dataclass(frozen=True)
class Answer:
    """Question, answer, and what to do.

    Attributes:
        question: one question.
        answer: yes, no or not known.
        verdict: the verdict behind it.
        reason: why, in one line; may be empty.
        next_step: what to do now; may be empty.
    """

    question: str
    answer: str
    verdict: Verdict
    reason: str
    next_step: str

    @property
    def label(self) -> str:
        """The verdict for a line of text: in capitals, with its common name."""
        return self.verdict.label.replace(self.verdict.value, self.verdict.value.upper(), 1)


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 cell``, ``2 cells``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def short_name(side: Side) -> str:
    """The side's name without a wheel's tags."""
    if not side.name.endswith(".whl"):
        return side.name
    name, version, *_ = f"{side.name.removesuffix('.whl')}-".split("-")
    return f"{name.replace('_', '-')} {version} (a wheel)"


def answer_of_gate(gate: GateReport) -> Answer:
    """May we move?"""
    before = gate.baseline.name
    return Answer(
        question=f"May we move from megatron-core {before} to {short_name(gate.candidate)}?",
        answer=_GATE_ANSWERS[gate.verdict],
        verdict=gate.verdict,
        reason=gate.reason,
        next_step=gate.next_step,
    )


def answer_of_run(report: Report, found: Sequence[Cause]) -> Answer:
    """Does it work with each of them? The next step is that of the first cause that counts."""
    count = len(report.planned)
    green = sum(cell.verdict.green for cell in report.cells)
    here = "this megatron-core" if count == 1 else f"these {count} megatron-cores"
    first = next((cause for cause in found if cause.level != "note"), None)
    if report.verdict.green:
        answer = "Yes." if count == 1 else f"Yes, with all {count}."
    elif report.verdict is Verdict.BREAK:
        answer = "No." if count == 1 else f"Not with all of them: {green} of {count} are green."
    else:
        answer = f"Not known: {green} of {count} are green, and the others were not fully judged."
    return Answer(
        question=f"Does {report.subject.judged} work with {here}?",
        answer=answer,
        verdict=report.verdict,
        reason="" if report.verdict.green or first is None else first.told,
        next_step="" if report.verdict.green or first is None else first.next_step,
    )
