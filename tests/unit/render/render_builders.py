"""Reports of every kind, with hostile text in them."""

from __future__ import annotations

from mcore_compat.gate.model import GateFinding, GateReport, Side, Tier
from mcore_compat.results import (
    CellResult,
    CheckCounts,
    CheckResult,
    Evidence,
    Finding,
    MegatronCore,
    Report,
    Seconds,
    SubjectInfo,
)
from mcore_compat.verdicts import Verdict

HOSTILE = "<script>alert(1)</script> ::error:: % , \" ' & \x1b[31m\x00 \ud83d\ude00".encode(
    "utf-16", "surrogatepass"
).decode("utf-16")


def cell(name: str, verdict: Verdict, failing: int = 0, message: str = HOSTILE, passing: int = 3) -> CellResult:
    failed = tuple(
        CheckResult(check=f"test_mtp.py::test_{n}", outcome="failed", expected=False, message=message, seconds=0.5)
        for n in range(failing)
    )
    passed = tuple(CheckResult(check=f"test_mode.py::test_{n}", outcome="passed") for n in range(passing))
    other = (
        CheckResult(check="test_mup.py::test_known", outcome="failed", expected=True, message="known upstream"),
        CheckResult(check="test_gpu.py::test_needs_gpu", outcome="skipped", message="no GPU"),
    )
    findings = tuple(
        Finding(kind="failed-check", message=r.message, check=r.check, next_step="look", verdict=Verdict.BREAK)
        for r in failed
    )
    if verdict is Verdict.UNRESOLVABLE:
        findings = (Finding(kind="cell-unresolvable", message="torch conflicts", verdict=verdict),)
        failed = passed = other = ()
    return CellResult(
        id=name,
        megatron_core=MegatronCore(requested=name, distribution=name, attribute=None, sha256="ab" * 32),
        contract_class="x",
        lane="cpu",
        torch="2.11.0",
        mode=None if verdict is Verdict.UNRESOLVABLE else "hook",
        expected_mode="hook",
        verdict=verdict,
        reason=message[:100] if failing else "",
        checks=CheckCounts(planned=5, passed=len(passed), failed=len(failed), skipped=1),
        evidence=Evidence(hook_calls=7),
        seconds=Seconds(provision=1.0, imports=8.0, suite=30.5),
        findings=findings,
        results=(*failed, *passed, *other),
    )


def report(*cells: CellResult, verdict: Verdict = Verdict.BREAK) -> Report:
    return Report(
        run_id="20260101T000000Z-abcd",
        started="2026-01-01T00:00:00+00:00",
        seconds=60.0,
        verdict=verdict,
        subject=SubjectInfo(name="mcore-compat", version="0.1.0", sha256="0" * 64, commit="0123456789ab"),
        suite_sha256="0" * 64,
        profile="ci",
        planned=tuple(c.id for c in cells),
        cells=cells,
    )


MIXED = report(
    cell("0.17.1", Verdict.OK), cell("0.18.2", Verdict.BREAK, failing=2), cell("0.19.2", Verdict.UNRESOLVABLE)
)


def gate(count: int = 1) -> GateReport:
    new = tuple(
        GateFinding(
            origin="contract", title="hook-keyword-missing", state="new", level="break", message=f"{n} {HOSTILE}",
            where="megatron/core/models/gpt/gpt_model.py:720", item=f"gpt.hook.{n}", witness="confirmed",
            witness_note="AssertionError", link="https://github.com/NVIDIA/Megatron-LM/pull/4686",
            consequence={"hook": "it fails"},
        )
        for n in range(count)
    )  # fmt: skip
    gone = GateFinding(origin="cell", title="test_a.py::t", state="fixed", level="break", message="x")
    side = Side(name="0.18.2", kind="release", distribution="0.18.2", modes={"gpt": "hook", "mimo": None})
    return GateReport(
        run_id="r", verdict=Verdict.BREAK, reason="because", next_step="Stay.", baseline=side, candidate=side,
        tiers=(Tier(name="static", ran=True),), findings=(*new, gone),
    )  # fmt: skip
