"""Write every format of a run into its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.gate.model import GateReport
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.report import gate_text as gate_render
from mcore_compat.report import markdown
from mcore_compat.report.annotations import render_annotations
from mcore_compat.report.html import render_page
from mcore_compat.report.junit import render_junit
from mcore_compat.report.sarif import render_sarif
from mcore_compat.report.timeline import timeline
from mcore_compat.results import Report

__all__ = ["write_formats", "write_gate", "write_run"]


def write_formats(
    save: Callable[[str, str], object], report: Report, data: Path, gate: GateReport | None = None
) -> None:
    """Render and save ``report.md``, ``report.html``, ``junit.xml``, ``results.sarif`` and ``annotations.txt``.

    Args:
        save: writes a text under a name in the run's folder, whole or not at all, and takes absolute paths out.
        report: the run.
        data: ``compat_matrix``, for the timeline.
        gate: the gate's report where there is one.
    """
    transitions = timeline(load_snapshots(data / "contracts"), load_rules(data / "rules"))
    save("report.md", markdown.render(report))
    save("report.html", render_page(report, transitions, gate))
    save("junit.xml", render_junit(report))
    save("results.sarif", render_sarif(report, gate))
    save("annotations.txt", "\n".join([*render_annotations(report, gate), ""]))


def write_run(folder: RunFolder, report: Report, data: Path, gate: GateReport | None = None) -> None:
    """Save a run's report, in every format."""
    folder.save_report(report)
    write_formats(folder.save_text, report, data, gate)


def write_gate(folder: RunFolder, gate: GateReport, report: Report | None, data: Path) -> None:
    """Save the gate's own reports, and every format of its cells' run where there was one."""
    folder.save_text("gate.json", gate.model_dump_json(indent=1) + "\n")
    folder.save_text("gate.md", gate_render.markdown(gate))
    if report is not None:
        write_run(folder, report, data, gate)
