"""A gate over an ordinary suite: nothing is declared, so the baseline says what must run."""

import json

from mcore_compat.gate.blame import upstream_failures
from mcore_compat.gate.compare import vanished
from mcore_compat.results import CellResult, CheckResult, MegatronCore
from mcore_compat.verdicts import Verdict


def cell(**outcomes):
    results = tuple(CheckResult(check=f"test_a.py::{name}", outcome=outcome) for name, outcome in outcomes.items())
    return CellResult(
        id="a", megatron_core=MegatronCore(requested="0.18.2"), contract_class="x", lane="cpu", verdict=Verdict.OK,
        results=results,
    )  # fmt: skip


def test_a_check_that_ran_before_and_does_not_now_is_never_passed_over():
    before = cell(test_one="passed", test_two="passed", test_three="failed", test_four="skipped", test_five="passed")
    after = cell(test_two="skipped", test_three="passed", test_five="failed", test_six="passed")
    found = vanished(before, after)
    assert [finding.message for finding in found] == [
        "test_a.py::test_one runs on the baseline and is not there now",
        "test_a.py::test_two runs on the baseline and is skipped now",
    ]
    assert {(finding.state, finding.level) for finding in found} == {("new", "unproven")}
    assert vanished(before, before) == ()


def failure(check, *files):
    entries = [{"data": {"reprfileloc": {"path": file, "lineno": 1}}} for file in files]
    return json.dumps(
        {"nodeid": check, "outcome": "failed", "when": "call", "longrepr": {"reprtraceback": {"reprentries": entries}}}
    )


def test_blame_knows_whose_code_is_judged():
    megatron = "/cell/lib/python3.12/site-packages/megatron/core/x.py"
    lines = [
        failure("a.py::test_theirs", "/suite/a.py", "/cell/lib/python3.12/site-packages/acme_rl/mtp.py", megatron),
        failure("a.py::test_module", "/suite/a.py", "/cell/lib/python3.12/site-packages/acme_tools.py", megatron),
        failure("a.py::test_upstream", "/suite/a.py", "/site-packages/mcore_fused/patch.py", megatron),
    ]
    assert upstream_failures(lines, ("acme_rl", "acme_tools")) == {"a.py::test_upstream"}
    assert upstream_failures(lines) == {"a.py::test_theirs", "a.py::test_module"}
