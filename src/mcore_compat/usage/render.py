"""A check's result as text, JSON and SARIF; uses as text and JSON. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mcore_compat.usage.extract import Extracted
from mcore_compat.usage.findings import Severity, UsageFinding
from mcore_compat.usage.matrix import UsageReport
from mcore_compat.usage.model import Use
from mcore_compat.usage.use_lists import UseList
from mcore_compat.usage.who_breaks import Breakage

__all__ = [
    "breakage_as_json",
    "breakage_as_text",
    "matrix_as_text",
    "report_as_json",
    "report_as_sarif",
    "report_as_text",
    "use_list_line",
    "uses_as_json",
    "uses_as_text",
]

_SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_SARIF_LIMIT = 5000


def uses_as_text(extracted: Extracted) -> str:
    """One line a use, and the counts."""
    lines = [f"{use.where}: {use.kind.value:11} {use.symbol}{_about(use)}" for use in extracted.uses]
    kinds = Counter(use.kind.value for use in extracted.uses)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    total = f"{len(extracted.symbols)} symbols in {len(extracted.uses)} uses"
    lines.append(f"{f'{extracted.name} {extracted.version}'.strip()}: {total} ({counts})")
    lines += [f"not read: {problem}" for problem in extracted.unread]
    return "\n".join(lines) + "\n"


def _about(use: Use) -> str:
    parts = []
    if use.arguments is not None:
        shown = [f"{use.arguments.positional} positional"] if use.arguments.positional else []
        parts.append("(" + ", ".join([*shown, *(f"{keyword}=" for keyword in use.arguments.keywords)]) + ")")
    if use.signature is not None:
        parts.append(f"with ({use.signature})")
    if use.guards:
        guards = dict.fromkeys(" ".join(filter(None, (g.kind.value, g.operator, g.text))) for g in use.guards)
        parts.append(f"[{', '.join(guards)}]")
    return " " + " ".join(parts) if parts else ""


def uses_as_json(extracted: Extracted) -> str:
    """Everything that is known of each use."""
    data = {
        "schema_version": 1,
        "source": extracted.name,
        "version": extracted.version,
        "unread": extracted.unread,
        "uses": [asdict(use) for use in extracted.uses],
    }
    return json.dumps(data, indent=1, default=str) + "\n"


def report_as_text(report: UsageReport, *, everything: bool = False) -> str:
    """Findings by Megatron, each at the adopter's line.

    Args:
        report: the result.
        everything: also expected findings, and those that an earlier column has told already.
    """
    name = f"{report.source} {report.version}".strip()
    lines = [f"{name}: {report.symbols} upstream symbols in {report.uses} uses"]
    told: set[tuple[str, str, int, str]] = set()
    for column in report.columns:
        mark = " (reference)" if column.reference else ""
        counts = Counter(finding.severity for finding in column.open)
        summary = ", ".join(f"{counts[severity]} {severity.value}" for severity in Severity if counts[severity])
        covered = len(column.findings) - len(column.open)
        more = f", {covered} expected" if covered else ""
        lines.append(f"{column.label}{mark}: {summary or 'fine'}{more}")
        shown = column.findings if everything else [f for f in column.open if f.key not in told]
        told |= {finding.key for finding in shown}
        lines += [line for finding in shown for line in _finding_lines(finding)]
        repeated = len(column.open) - len(shown)
        if repeated > 0:
            lines.append(f"  {repeated} findings as above")
    lines += [f"not read: {problem}" for problem in report.unread]
    lines += [f"stale: {problem}" for problem in report.stale]
    return "\n".join(lines) + "\n"


def _finding_lines(finding: UsageFinding) -> Iterator[str]:
    expected = f" (expected: {finding.expected})" if finding.expected else ""
    yield f"  {finding.where}: {finding.severity.value}: {finding.message}{expected}"
    since = f"since {finding.first_bad}" if finding.good else f"already with {finding.first_bad}"
    good = f", {finding.good} is free of it" if finding.good else ""
    yield f"    {since}{good}" + (f"; by {finding.commit}" if finding.commit else "")
    if finding.replacement:
        yield f"    upstream has {', '.join(finding.replacement)}"


def report_as_json(report: UsageReport) -> str:
    """The result as data."""
    data = {
        "schema_version": 1,
        "source": report.source,
        "version": report.version,
        "uses": report.uses,
        "symbols": report.symbols,
        "unread": report.unread,
        "stale": report.stale,
        "columns": [
            {
                "against": column.label,
                "reference": column.reference,
                "severity": column.severity,
                "findings": [asdict(finding) for finding in column.findings],
            }
            for column in report.columns
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def breakage_as_text(breakage: Breakage) -> str:
    """The commit, the downstream, and each of its lines."""
    lines = [f"{breakage.title}", f"  {breakage.downstream}: {len(breakage.findings)} findings"]
    for finding in breakage.findings:
        more = f" Upstream has {', '.join(finding.replacement)}." if finding.replacement else ""
        lines.append(f"    {finding.where}: {finding.severity.value}: {finding.message}{more}")
    return "\n".join(lines) + "\n"


def breakage_as_json(breakage: Breakage) -> str:
    """One line of JSON."""
    return json.dumps(asdict(breakage)) + "\n"


def use_list_line(uses: UseList) -> str:
    """Name, version, counts and pin of a use list."""
    found = uses.extracted
    return (
        f"{found.name:16} {found.version:24} {len(found.symbols):5} symbols {len(found.uses):6} uses  "
        f"written for {uses.pin or 'no stated release'}"
    )


def matrix_as_text(reports: Sequence[UsageReport]) -> str:
    """Downstreams by Megatrons: the count of findings and the first letter of the worst severity."""
    labels = [column.label for column in reports[0].columns] if reports else []
    lines = [" " * 16 + "".join(f"{label[:9]:>10}" for label in labels)]
    for report in reports:
        cells = []
        for column in report.columns:
            word = f"{len(column.open)} {column.severity.name.lower()[:4]}" if column.severity else "ok"
            cells.append(f"{word + ('*' if column.reference else ''):>10}")
        lines.append(f"{report.source:16}" + "".join(cells))
    lines.append("*: the Megatron that the others are compared with")
    return "\n".join(lines) + "\n"


def report_as_sarif(report: UsageReport) -> str:
    """SARIF 2.1.0 at the adopter's own files; one result for each finding, at the oldest Megatron that has it."""
    first: dict[tuple[str, str, int, str], UsageFinding] = {}
    for column in report.columns:
        for finding in column.findings:
            first.setdefault(finding.key, finding)
    results = [_sarif_result(finding) for finding in list(first.values())[:_SARIF_LIMIT]]
    rules = sorted({finding.rule for finding in first.values()})
    run = {
        "tool": {
            "driver": {
                "name": "mcore-compat check",
                "rules": [{"id": rule, "shortDescription": {"text": rule.replace("-", " ")}} for rule in rules],
            }
        },
        "originalUriBaseIds": {"SOURCE": {"description": {"text": "root of the checked source"}}},
        "columnKind": "utf16CodeUnits",
        "results": results,
    }
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _sarif_result(finding: UsageFinding) -> dict[str, Any]:
    fingerprint = hashlib.sha256(f"{finding.rule}\0{finding.file}\0{finding.symbol}".encode()).hexdigest()[:32]
    more = f" Upstream has {', '.join(finding.replacement)}." if finding.replacement else ""
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": "warning" if finding.severity is Severity.SILENT else "error",
        "message": {"text": f"{finding.severity.value} since {finding.first_bad}: {finding.message}{more}"},
        "partialFingerprints": {"mcoreCompatUsage/v1": fingerprint},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": finding.file, "uriBaseId": "SOURCE"},
                    "region": {"startLine": max(1, finding.line)},
                }
            }
        ],
    }
    if finding.expected:
        result["suppressions"] = [{"kind": "external", "justification": finding.expected}]
    return result
