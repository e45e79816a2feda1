"""Write every format of a run into its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.errors import ReportError
from mcore_compat.files.scrub import Scrubber
from mcore_compat.gate.model import GateReport
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.report import gate_text, markdown
from mcore_compat.report.annotations import render_annotations
from mcore_compat.report.clean import cleaned
from mcore_compat.report.html import render_page
from mcore_compat.report.junit import render_junit
from mcore_compat.report.readable import unreadable
from mcore_compat.report.sarif import render_sarif
from mcore_compat.report.timeline import timeline
from mcore_compat.results import Report

__all__ = ["write_formats", "write_gate", "write_run"]

type Save = Callable[[str, str], object]


class _Checked:
    """Saves what a strict parser can read back; keeps the names of the others, whose earlier files stay."""

    def __init__(self, save: Save, scrub: Callable[[str], str]) -> None:
        self._save = save
        self._scrub = scrub
        self._problems: list[str] = []

    def __call__(self, name: str, render: Callable[[], str]) -> None:
        """Render, check and save one format; a format that cannot be rendered does not cost the others."""
        try:
            text = self._scrub(render())
        except Exception as error:  # noqa: BLE001 - whatever one format meets, the others are still written
            self._problems.append(f"{name} ({type(error).__name__}: {error})")
            return
        problem = unreadable(name, text)
        if problem:
            self._problems.append(f"{name} ({problem})")
        else:
            self._save(name, text)

    def finish(self) -> None:
        """Raise for what could not be saved.

        Raises:
            ReportError: a format could not be rendered or read back.
        """
        if self._problems:
            raise ReportError(
                f"These formats were not written: {'; '.join(self._problems)}.",
                "Read report.json, which is complete, and report this as a bug of the format.",
            )


def write_formats(
    save: Save,
    report: Report,
    data: Path,
    gate: GateReport | None = None,
    scrub: Callable[[str], str] = str,
) -> None:
    """Render and save ``report.md``, ``report.html``, ``junit.xml``, ``results.sarif`` and ``annotations.txt``.

    Args:
        save: writes a text under a name in the run's folder, whole or not at all.
        report: the run.
        data: ``compat_matrix``, for the timeline.
        gate: the gate's report, if there is one.
        scrub: takes absolute paths out of a text.

    Raises:
        ReportError: a format could not be rendered, or a strict parser cannot read it back. The other formats are
            saved, and an earlier file of that name stays as it is.
    """
    transitions = timeline(load_snapshots(data / "contracts"), load_rules(data / "rules"))
    checked = _Checked(save, scrub)
    checked("report.md", lambda: markdown.render(report))
    checked("report.html", lambda: render_page(report, transitions, gate))
    checked("junit.xml", lambda: render_junit(report))
    checked("results.sarif", lambda: render_sarif(report, gate))
    checked("annotations.txt", lambda: "\n".join([*render_annotations(report, gate), ""]))
    checked.finish()


def write_run(folder: RunFolder, report: Report, data: Path, gate: GateReport | None = None) -> None:
    """Save a run's report, in every format.

    Raises:
        ReportError: a format could not be written.
    """
    report, scrubber = _scrubbed(report, folder.scrubber), folder.scrubber
    folder.save_report(report)
    write_formats(folder.save_text, report, data, _scrubbed(gate, scrubber) if gate else None, scrubber.text)


def write_gate(folder: RunFolder, gate: GateReport, report: Report | None, data: Path) -> None:
    """Save the gate's own reports, and every format of its cells' run if there was one.

    Raises:
        ReportError: a format could not be written.
    """
    gate = _scrubbed(gate, folder.scrubber)
    checked = _Checked(folder.save_text, folder.scrubber.text)
    checked("gate.json", lambda: gate.model_dump_json(indent=1) + "\n")
    checked("gate.md", lambda: gate_text.markdown(gate))
    if report is not None:
        write_run(folder, report, data, gate)
    else:
        checked("results.sarif", lambda: render_sarif(None, gate))
        checked("annotations.txt", lambda: "\n".join([*render_annotations(None, gate), ""]))
    checked.finish()


def _scrubbed[Model: BaseModel](model: Model, scrubber: Scrubber) -> Model:
    """The model with texts that are safe and name no absolute path.

    Paths leave before the formats escape anything: what stands for a path has pointed brackets, which are markup later.
    """
    clean = cleaned(model)
    return type(clean).model_validate(scrubber.data(clean.model_dump(mode="json")))
