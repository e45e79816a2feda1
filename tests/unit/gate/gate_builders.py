"""Small reports for the gate's tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import ClassVar

from mcore_compat.gate.model import GateFinding, Side, Tier
from mcore_compat.records import Environment, EnvironmentFacts, ProjectWheel, Provisioned
from mcore_compat.results import CellResult, CheckCounts, CheckResult, Finding, MegatronCore
from mcore_compat.verdicts import Verdict

RAN = (Tier(name="static", ran=True), Tier(name="cpu", ran=True))


def cell(name: str, verdict: Verdict = Verdict.OK, failures: dict[str, str] | None = None, **given) -> CellResult:
    """A judged cell whose checks of these names failed with these messages."""
    failures = failures or {}
    if failures and verdict is Verdict.OK:
        verdict = Verdict.BREAK
    findings = tuple(
        Finding(kind="failed-check", check=check, message=message, verdict=Verdict.BREAK, next_step="look")
        for check, message in failures.items()
    )
    results = tuple(
        CheckResult(check=check, outcome="failed", expected=False, message=message)
        for check, message in failures.items()
    )
    fields = {
        "megatron_core": MegatronCore(requested=name),
        "contract_class": "x",
        "lane": "cpu",
        "expected_mode": "hook",
        "mode": "hook",
        "reason": next(iter(failures.values()), ""),
        "checks": CheckCounts(planned=1, passed=1),
        "findings": findings,
        "results": results,
    }
    return CellResult(id=name, verdict=verdict, **(fields | given))


def side(name: str, judged: CellResult | None = None, modes: dict[str, str | None] | None = None) -> Side:
    return Side(name=name, kind="release", modes={"gpt": "hook"} if modes is None else modes, cell=judged)


def contract_finding(state: str = "new", level: str = "break", witness: str = "not run", **given) -> GateFinding:
    fields = {"title": "some-rule", "message": "something moved", "consequence": {"hook": "it fails", "copy": "x"}}
    return GateFinding(origin="contract", state=state, level=level, witness=witness, **(fields | given))


class FakeLane:
    """A lane whose cells are never made: their results are given."""

    wheel = ProjectWheel("mcore-compat", "0.1.0", "ab" * 32, None, Path("x.whl"))
    roots: ClassVar = {}
    package = None

    def __init__(self, environments):
        self.environments = environments

    def adapted(self, cells):
        return tuple(cells)

    def hold(self, cell, cancel, say):
        return contextlib.nullcontext(True)

    def provision(self, cell):
        facts = EnvironmentFacts(
            python="3.12.1",
            user_site=False,
            distributions={},
            megatron_roots=(),
            megatron_files=None,
            subject_files=None,
        )
        return Provisioned(0.1, Environment(self.environments / cell.id, facts, "", reused=False))
