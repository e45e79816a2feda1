"""``report.html``: one file, no script, nothing fetched; for phone, keyboard and screen reader too. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from mcore_compat.gate.model import GateReport
from mcore_compat.report.answer import answer_of_gate, answer_of_run, counted
from mcore_compat.report.causes import HEADINGS, STATES, Cause, all_causes
from mcore_compat.report.clean import cleaned, sentence, shortened
from mcore_compat.report.templates import load_template
from mcore_compat.report.timeline import Transition
from mcore_compat.results import CellResult, CheckResult, Report, signature

__all__ = ["Budget", "render_page"]

_OPEN_CARDS = 3
_TITLE = 220


@dataclass(frozen=True)
class Budget:
    """What a page may hold; whatever is cut is counted on the page.

    Attributes:
        message: characters of one message.
        failures: failures shown in full for one cell.
        total: characters of all messages together; a browser and a CI artefact viewer stay quick below it.
    """

    message: int = 1500
    failures: int = 40
    total: int = 1_500_000


@dataclass
class _Cutter:
    """Shortens messages, and knows how much was cut."""

    budget: Budget
    used: int = 0
    cut_messages: int = field(default=0)

    def __call__(self, message: str) -> str:
        room = max(0, min(self.budget.message, self.budget.total - self.used))
        if len(message) <= room:
            self.used += len(message)
            return message
        self.cut_messages += 1
        self.used += room
        return f"{message[:room]}\n… {len(message) - room} characters cut; report.json has them"


@dataclass(frozen=True)
class _Group:
    """One property (a file of the suite) in one cell."""

    name: str
    anchor: str
    checks: tuple[CheckResult, ...]

    @property
    def counts(self) -> dict[str, int]:
        wrong = sum(c.outcome == "failed" and not c.expected for c in self.checks)
        known = sum(c.outcome == "failed" and c.expected for c in self.checks)
        return {
            "passed": sum(c.outcome == "passed" for c in self.checks),
            "failed": wrong,
            "expected": known,
            "skipped": sum(c.outcome == "skipped" for c in self.checks),
        }

    @property
    def state(self) -> str:
        """``failed``, ``skipped`` or ``passed``."""
        counts = self.counts
        if counts["failed"]:
            return "failed"
        return "skipped" if counts["skipped"] and not counts["passed"] else "passed"


def _property(check: str) -> str:
    return check.partition("::")[0].removeprefix("test_").removesuffix(".py").replace("_", " ")


def _anchor(*parts: str) -> str:
    return "-".join("".join(c if c.isalnum() else "-" for c in part) for part in parts)


def _groups(cell: CellResult, names: Sequence[str]) -> dict[str, _Group]:
    found: dict[str, list[CheckResult]] = {}
    for result in cell.results:
        found.setdefault(_property(result.check), []).append(result)
    order = {"failed": 0, "skipped": 1, "passed": 2}
    return {
        name: _Group(
            name,
            _anchor("cell", cell.id, name),
            tuple(sorted(found[name], key=lambda c: (order[c.outcome], c.check))),
        )
        for name in names
        if name in found
    }


def _code(text: str) -> markupsafe.Markup:
    """Escaped text, with what is in backticks as code; a backtick without a partner stays."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    shown = [markupsafe.escape(part) for part in parts]
    pieces = [f"<code>{part}</code>" if number % 2 and part else str(part) for number, part in enumerate(shown)]
    return markupsafe.Markup("".join(pieces))  # noqa: S704 - every piece is escaped above


class _Causes:
    """Which cause a failed check belongs to."""

    def __init__(self, found: Sequence[Cause]) -> None:
        self._signatures = [signature(cause.message) for cause in found]
        self._numbers: dict[str, list[int]] = {}
        for number, cause in enumerate(found, start=1):
            for check in cause.checks:
                self._numbers.setdefault(check, []).append(number)

    def __call__(self, result: CheckResult) -> int | None:
        """The number of the cause, counted from 1; None where there is none."""
        numbers = self._numbers.get(result.check, [])
        same = [n for n in numbers if self._signatures[n - 1] == signature(result.message)]
        return next(iter([*same, *numbers]), None)


@functools.cache
def _template() -> jinja2.Template:
    return load_template(Path(__file__).with_name("report.html.j2"), {"code": _code})


def render_page(
    report: Report,
    transitions: Sequence[Transition] = (),
    gate: GateReport | None = None,
    budget: Budget | None = None,
) -> str:
    """The whole page.

    Args:
        report: the run.
        transitions: the contract's timeline.
        gate: the gate's report where the run was a gate's.
        budget: how much it may hold.
    """
    report = cleaned(report)
    gate = cleaned(gate) if gate is not None else None
    found = all_causes(report, gate)
    numbered = [*enumerate(found, start=1)]
    cut = _Cutter(budget or Budget())
    names = sorted({_property(result.check) for cell in report.cells for result in cell.results})
    longest = max((sum(cell.seconds.model_dump().values()) for cell in report.cells), default=1.0) or 1.0
    cells: list[dict[str, Any]] = [
        {"result": cell, "anchor": _anchor("cell", cell.id), "groups": _groups(cell, names)} for cell in report.cells
    ]
    tallies = {
        verdict: sum(cell.verdict == verdict for cell in report.cells)
        for verdict in dict.fromkeys(cell.verdict for cell in report.cells)
    }
    body = _template().render(
        report=report,
        cells=cells,
        names=names,
        answer=answer_of_run(report, found) if gate is None else answer_of_gate(gate),
        found=found,
        counting=[(number, cause) for number, cause in numbered if cause.level != "note"],
        notes=[(number, cause) for number, cause in numbered if cause.level == "note"],
        cause_of=_Causes(found),
        states=STATES,
        headings=HEADINGS,
        counted=counted,
        short=shortened,
        sentence=sentence,
        open_cards=_OPEN_CARDS,
        title_limit=_TITLE,
        transitions=transitions,
        gate=gate,
        tallies=tallies,
        longest=longest,
        cut=cut,
        limit=cut.budget.failures,
    )
    # The count is known only when everything is rendered.
    note = f"{cut.cut_messages} messages were shortened." if cut.cut_messages else "No message was shortened."
    return body.replace("@@CUT@@", note)
