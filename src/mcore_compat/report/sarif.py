"""SARIF 2.1.0 for code scanning: contract findings at upstream's lines, failed checks at the suite's files. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from mcore_compat.gate.model import GateReport
from mcore_compat.results import Finding, Report, signature
from mcore_compat.verdicts import severity

__all__ = ["MAX_RESULTS", "SCHEMA", "render_sarif"]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 5000  # GitHub takes up to 25,000 and shows the first 5,000
_MAX_MESSAGE = 1000


def _location(path: str, line: int, base: str) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": path, "uriBaseId": base}, "region": {"startLine": max(1, line)}}
    return {"physicalLocation": place}


def _result(rule: str, level: str, message: str, key: str, **more: Any) -> dict[str, Any]:
    text = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}… ({len(message)} characters)"
    fingerprint = hashlib.sha256(f"{rule}\0{key}\0{signature(message)}".encode()).hexdigest()[:32]
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": text},
        "partialFingerprints": {"mcoreCompat/v1": fingerprint},
        **more,
    }


def _of_cells(report: Report) -> Iterable[dict[str, Any]]:
    named: list[tuple[str, Finding]] = [(cell.id, finding) for cell in report.cells for finding in cell.findings]
    named += [("run", finding) for finding in report.findings]
    for cell, finding in named:
        more: dict[str, Any] = {"properties": {"cell": cell}}
        file = (finding.check or "").partition("::")[0]
        if file.endswith(".py"):
            more["locations"] = [_location(f"tests/compat/{file}", 1, "SUITE")]
        about = f"{finding.check}: " if finding.check else ""
        yield _result(finding.kind, severity(finding.weight), f"[{cell}] {about}{finding.message}", cell, **more)


def _of_gate(gate: GateReport) -> Iterable[dict[str, Any]]:
    for finding in gate.findings:
        if finding.origin != "contract" or finding.state not in {"new", "same"}:
            continue
        path, _, line = (finding.where or "").rpartition(":")
        more: dict[str, Any] = {
            "baselineState": "new" if finding.state == "new" else "unchanged",
            "properties": {"witness": finding.witness, "consequence": finding.consequence},
        }
        if path and line.isdigit():
            more["locations"] = [_location(path, int(line), "MEGATRON")]
        yield _result(finding.title, severity(finding.weight), finding.message, finding.item or "", **more)


def render_sarif(report: Report | None, gate: GateReport | None = None) -> str:
    """One SARIF log with one run; results above the limit are left out and counted in a notification."""
    results = [*(_of_gate(gate) if gate else ()), *(_of_cells(report) if report else ())]
    order = {"error": 0, "warning": 1, "note": 2}
    results.sort(key=lambda result: order[result["level"]])
    kept = results[:MAX_RESULTS]
    links = {finding.title: finding.link for finding in gate.findings if finding.link} if gate else {}
    rules = [
        {"id": rule, "shortDescription": {"text": rule.replace("-", " ")}}
        | ({"helpUri": links[rule]} if rule in links else {})
        for rule in sorted({result["ruleId"] for result in kept})
    ]
    invocation: dict[str, Any] = {"executionSuccessful": True}
    if len(results) > len(kept):
        text = f"{len(results) - len(kept)} results were left out; report.json has them all"
        invocation["toolExecutionNotifications"] = [{"level": "warning", "message": {"text": text}}]
    run = {
        "tool": {"driver": {"name": "mcore-compat", "rules": rules}},
        "originalUriBaseIds": {
            "MEGATRON": {"description": {"text": "root of the megatron-core source"}},
            "SUITE": {"description": {"text": "root of this project"}},
        },
        "invocations": [invocation],
        "columnKind": "utf16CodeUnits",
        "results": kept,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"
