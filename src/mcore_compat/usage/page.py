"""One static page of downstreams and Megatrons: no script, nothing fetched, light and dark. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jinja2

from mcore_compat.report.templates import load_template
from mcore_compat.usage.findings import Severity, UsageFinding
from mcore_compat.usage.matrix import Column, UsageReport

__all__ = ["render_usage_page"]

_CLASSES = {
    Severity.IMPORT: "import",
    Severity.CALL: "call",
    Severity.MISFIT: "misfit",
    Severity.MOVED: "misfit",
    Severity.PATCH_FILE: "misfit",
    Severity.SILENT: "silent",
}
_SHOWN = 60


@functools.cache
def _template() -> jinja2.Template:
    return load_template(Path(__file__).with_name("page.html.j2"))


def _anchor(*parts: str) -> str:
    return "-".join("".join(c if c.isalnum() else "-" for c in part) for part in parts)


def _mark(column: Column) -> tuple[str, str]:
    """Class and word of a cell."""
    severity = column.severity
    return (_CLASSES[severity], severity.value) if severity else ("fine", "fine")


def _grouped(column: Column) -> list[tuple[UsageFinding, list[UsageFinding]]]:
    """Findings by symbol and rule, the worst first; each with those at other lines."""
    order = list(Severity)
    groups: dict[tuple[str, str], list[UsageFinding]] = {}
    for finding in column.open:
        groups.setdefault((finding.rule, finding.symbol), []).append(finding)
    rows = sorted(groups.values(), key=lambda found: (order.index(found[0].severity), found[0].symbol))
    return [(found[0], found) for found in rows]


def render_usage_page(reports: Sequence[UsageReport], title: str = "Who works with which Megatron-Core") -> str:
    """The whole page; every cell links to the findings behind it."""
    labels = list(dict.fromkeys(column.label for report in reports for column in report.columns))
    rows = []
    for report in reports:
        columns = {column.label: column for column in report.columns}
        cells = []
        for label in labels:
            column = columns.get(label)
            if column is None:
                cells.append({"label": label, "kind": "none", "word": "not checked", "count": 0, "anchor": ""})
                continue
            kind, word = _mark(column)
            cells.append(
                {
                    "label": label,
                    "kind": kind,
                    "word": word,
                    "count": len(column.open),
                    "reference": column.reference,
                    "anchor": _anchor("d", report.source, label),
                    "groups": _grouped(column)[:_SHOWN],
                    "more": max(0, len(_grouped(column)) - _SHOWN),
                }
            )
        rows.append({"report": report, "cells": cells, "anchor": _anchor("d", report.source)})
    return _template().render(title=title, labels=labels, rows=rows, severities=list(_CLASSES.items()))
