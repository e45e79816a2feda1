"""JUnit XML: one suite a cell, one case a check. Pure."""

from __future__ import annotations

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from mcore_compat.report.clean import cleaned
from mcore_compat.results import CellResult, Report
from mcore_compat.verdicts import Verdict

__all__ = ["render_junit"]

_MAX_MESSAGE = 4000


def _limited(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}… ({len(text)} characters)"


def _suite(cell: CellResult) -> TestSuite:
    suite = TestSuite(cell.id)
    for name, value in (
        ("verdict", cell.verdict.value),
        ("mode", cell.mode or ""),
        ("expected_mode", cell.expected_mode or ""),
        ("distribution", cell.megatron_core.distribution or ""),
        ("attribute", cell.megatron_core.attribute or ""),
        ("torch", cell.torch or ""),
        ("triton", cell.triton or ""),
        ("device", cell.device or ""),
        *((name, str(count)) for name, count in cell.evidence.model_dump().items()),
    ):
        suite.add_property(name, value)
    for result in cell.results:
        file, _, test = result.check.partition("::")
        case = TestCase(test or file, f"{cell.id}.{file.removesuffix('.py')}", result.seconds)
        if result.outcome == "failed":
            first = _limited(result.message.partition("\n")[0])
            kind = Skipped(f"expected failure: {first}") if result.expected else Failure(first, "failed")
            kind.text = _limited(result.message)
            case.result = [kind]
        elif result.outcome == "skipped":
            case.result = [Skipped(_limited(result.message.partition("\n")[0]))]
        suite.add_testcase(case)
    # What is held against a cell and is no failed check must not be lost: a cell that ran nothing would look green.
    failed = {result.check for result in cell.results if result.outcome == "failed"}
    rest = [f for f in cell.findings if f.verdict not in {None, Verdict.DRIFT} and f.check not in failed]
    for number, finding in enumerate(rest):
        case = TestCase(finding.check or f"{finding.kind} {number}", f"{cell.id}.verdict", 0.0)
        error = Error(_limited(finding.message.partition("\n")[0]), finding.kind)
        error.text = _limited(f"{finding.message}\n{finding.next_step}")
        case.result = [error]
        suite.add_testcase(case)
    return suite


def render_junit(report: Report) -> str:
    """The run as JUnit XML."""
    report = cleaned(report)
    document = JUnitXml("mcore-compat")
    for cell in report.cells:
        document.add_testsuite(_suite(cell))
    for finding in report.findings:
        if finding.verdict is None or finding.verdict.green:  # a note
            continue
        suite = TestSuite("run")
        case = TestCase(finding.kind, "run", 0.0)
        case.result = [Error(_limited(finding.message.partition("\n")[0]), finding.kind)]
        suite.add_testcase(case)
        document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]
    text: bytes = document.tostring()  # type: ignore[no-untyped-call]
    return text.decode()
