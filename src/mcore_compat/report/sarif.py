"""SARIF 2.1.0 for code scanning: causes at upstream's lines, or at the suite's files. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_compat.gate.model import GateReport
from mcore_compat.report.causes import Cause, all_causes
from mcore_compat.report.clean import cleaned
from mcore_compat.results import Report, signature
from mcore_compat.verdicts import LEVELS, severity

__all__ = ["MAX_RESULTS", "RULE_TEXTS", "SCHEMA", "render_sarif"]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 5000  # GitHub takes up to 25,000 and shows the first 5,000
_MAX_MESSAGE = 1000
_MAX_CHECKS = 200
_MAX_PLACES = 20
_UPSTREAM, _SUITE, _SOURCE = "MEGATRON", "SUITE", "SOURCE"
# What the kinds of findings that are no contract rules mean.
RULE_TEXTS: Mapping[str, str] = {
    "as-declared": "A check fails or is skipped as expectations.toml declares it, with a reason and an expiry date.",
    "candidate-plugin": "The candidate brings a pytest plugin. It is not loaded.",
    "case-count": "A check ran another number of cases than inventory.toml declares.",
    "cell-infra": "The cell's environment could not be made or verified on this host.",
    "cell-lost": "A planned cell has no result.",
    "cell-unproven": "The cell could not be judged.",
    "cell-unresolvable": "No environment with the cell's requirements can be made.",
    "collection-error": "A file of the suite cannot be imported.",
    "control-missing": "A live control did not run, so nothing shows that checks can fail here.",
    "control-passed": "A check passes against a subject that is wrong on purpose.",
    "count-mismatch": "What pytest collected and what it reported are not the same checks.",
    "crash": "The suite's process was ended by a signal.",
    "environment-remade": "The environment was not as it was verified, and was made again.",
    "exit-status": "The suite's exit status does not agree with its log.",
    "expectation-stale": "An entry of expectations.toml has expired, or its check no longer fails as declared.",
    "expectation-unused": "No cell uses an entry of expectations.toml.",
    "failed-check": "A check of the property suite fails.",
    "foreign-module": "A module was imported from outside the cell's environment.",
    "image": "The host's own Python, torch, triton and numpy.",
    "image-changed": "The run changed the host's torch, triton or numpy.",
    "image-unchanged": "The run left the host's torch, triton and numpy as they were.",
    "incomplete-facts": "The suite did not come to the end of its session.",
    "incomplete-log": "The suite's log has no last record, or cannot be read.",
    "left-behind": "Processes of the cell were still alive at its end, and were killed.",
    "measured": "A figure that a check measured.",
    "missing-check": "A check that inventory.toml declares did not run.",
    "mode-corrected": "Upstream calls its hook, although reading its source did not find the call.",
    "no-checks": "The suite ran no check at all.",
    "no-expected-mode": "The matrix does not say which mode a cell must have.",
    "nothing-ran": "All checks of the suite were skipped.",
    "no-evidence": "The counters do not show that the fused path ran.",
    "no-facts": "The suite wrote no facts, or they cannot be read.",
    "no-start": "The suite did not start.",
    "not-applicable": "Checks about a capability that the subject says it does not have.",
    "process-limit": "The cell reached its limit of processes.",
    "reuse-refuted": "A result of an earlier run did not hold when its cell was judged again.",
    "reused": "The result of an earlier run with the same inputs.",
    "shard-missing": "A shard of the run was not handed to the merge.",
    "shard-unfinished": "A shard of the run did not come to its end.",
    "skipped-check": "A check that inventory.toml declares was skipped.",
    "skipped-checks": "Checks of a suite without an inventory were skipped.",
    "stock-changed": "Unpatched megatron-core computes something else than before on the same weights.",
    "source-unread": "A file of the project's own source that names Megatron is not readable as Python.",
    "time-limit": "The suite did not end within the cell's time limit.",
    "tried-again": "The cell was judged after its worker or node was lost.",
    "undeclared-check": "A check ran that inventory.toml does not declare for this cell.",
    "usage-expectation-stale": "An entry of usage.toml has expired, or covers no finding.",
    "wrong-mode": "The subject chose another mode than the cell expects.",
    "wrong-origin": "megatron.core was imported from another place than the cell's environment.",
    "wrong-subject": "The suite judged another implementation than it was told to.",
    "wrong-version": "The suite ran with another version than was installed or asked for.",
}


def _location(path: str, line: int, base: str) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": path, "uriBaseId": base}, "region": {"startLine": max(1, line)}}
    return {"physicalLocation": place}


def _result(cause: Cause, folder: str) -> dict[str, Any]:
    """One result per cause: at the project's line, else upstream's, else the first check's file; others are related."""
    files = dict.fromkeys(check.partition("::")[0] for check in cause.checks)
    named = [file for file in files if file.endswith(".py") and folder]
    suite = [_location(f"{folder}/{file}", 1, _SUITE) for file in named]
    path, _, line = cause.where.rpartition(":")
    upstream = [_location(path, int(line), _UPSTREAM)] if path and line.isdigit() else []
    file, _, number = cause.source.rpartition(":")
    own = [_location(file, int(number), _SOURCE)] if file else []
    text = cause.message if cause.in_source else f"{_about(cause)}{cause.message}"
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]}… ({len(text)} characters)"
    key = f"{cause.kind}\0{file or path}\0{signature(cause.message)}"
    properties: dict[str, Any] = {
        "level": cause.level,
        "cells": list(cause.cells),
        "checks": list(cause.checks[:_MAX_CHECKS]),
        "checkCount": len(cause.checks),
        "nextStep": cause.next_step,
    }
    if cause.in_source:
        properties |= {"reproducer": cause.reproducer, "consequences": dict(cause.consequences)}
    result: dict[str, Any] = {
        "ruleId": cause.kind,
        "level": severity(cause.weight),
        "message": {"text": text},
        "partialFingerprints": {"mcoreCompat/v2": hashlib.sha256(key.encode()).hexdigest()[:32]},
        "properties": properties,
    }
    places = [*own, *upstream, *suite]
    if places:
        result["locations"] = places[:1]
    if len(places) > 1:
        result["relatedLocations"] = [{"id": number, **place} for number, place in enumerate(places[1:_MAX_PLACES])]
    if cause.state in {"new", "same"}:
        result["baselineState"] = "new" if cause.state == "new" else "unchanged"
    return result


def _about(cause: Cause) -> str:
    cells = f"[{', '.join(cause.cells[:_MAX_PLACES])}] " if cause.cells else ""
    return cells + (f"{cause.scope}: " if cause.checks else "")


def _rule(kind: str, found: Iterable[Cause]) -> dict[str, Any]:
    members = [cause for cause in found if cause.kind == kind]
    link = next((cause.link for cause in members if cause.link), None)
    words = "; ".join(f"{mode}: {text}" for mode, text in members[0].by_mode)
    name = kind.replace("-", " ")
    rule: dict[str, Any] = {
        "id": kind,
        "shortDescription": {"text": name},
        "fullDescription": {"text": RULE_TEXTS.get(kind, words or name)},
        "help": {"text": words or RULE_TEXTS.get(kind, name)},
        "defaultConfiguration": {"level": severity(min((c.weight for c in members), key=LEVELS.index))},
    }
    return rule | ({"helpUri": link} if link else {})


def render_sarif(report: Report | None, gate: GateReport | None = None) -> str:
    """One SARIF log with one run; results above the limit are left out and counted in a notification."""
    report = cleaned(report) if report else None
    gate = cleaned(gate) if gate else None
    found = sorted(
        (c for c in all_causes(report, gate) if c.state != "fixed"), key=lambda cause: LEVELS.index(cause.weight)
    )
    results = [_result(cause, report.suite if report else "") for cause in found]
    kept = results[:MAX_RESULTS]
    rules = [_rule(kind, found) for kind in sorted({result["ruleId"] for result in kept})]
    invocation: dict[str, Any] = {"executionSuccessful": True}
    if len(results) > len(kept):
        text = f"{len(results) - len(kept)} results were left out; report.json has everything"
        invocation["toolExecutionNotifications"] = [{"level": "warning", "message": {"text": text}}]
    run = {
        "tool": {"driver": {"name": "mcore-compat", "rules": rules}},
        "originalUriBaseIds": {
            _UPSTREAM: {"description": {"text": "root of the megatron-core source"}},
            _SUITE: {"description": {"text": "root of this project's checkout"}},
            _SOURCE: {"description": {"text": "root of the project whose source was checked"}},
        },
        "invocations": [invocation],
        "columnKind": "utf16CodeUnits",
        "results": kept,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"
