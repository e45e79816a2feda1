"""Faults of what a run is given: a real run of the harness on a real cell, judged by its report.

The suite is a copy of the property suite, cut to a few checks so that a run takes seconds; the fault is planted in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from catalogue import ROOT, CatalogueError, Fault
from places import RELEASES, Outcome

# The checks that stay, by file; small and fast, in both modes.
KEPT = {"test_mup.py": ("test_mup_multiplier",), "test_numbers.py": ("test_ignored_labels_are_exactly_zero",)}
# How many cases each has, and how often the fused head runs in it at least, as an inventory declares them.
CASES = {"test_mup_multiplier": 12, "test_ignored_labels_are_exactly_zero": 2}
CONTROL = "test_numbers.py::test_ignored_labels_are_exactly_zero"
LIMIT_S = 600
GREEN = Fault("(nothing planted)", "nothing is planted", "", "run", "", (), verdict="ok")


def plant_all(faults: Iterable[Fault], cells: Path, scratch: Path) -> Iterator[Outcome]:
    """Run the harness on one cell, first with the suite as it is, then with each fault in it."""
    for number, fault in enumerate([GREEN, *faults]):
        yield _run(fault, cells, scratch / str(number))


def _run(fault: Fault, cells: Path, folder: Path) -> Outcome:
    started = time.monotonic()
    try:
        suite = _suite(fault, folder)
    except CatalogueError as error:  # the checkout was changed while this ran
        return Outcome(fault, False, str(error), 0.0)
    inventory = folder / "inventory.toml"
    inventory.write_text(_inventory(), encoding="utf-8")
    command = [
        sys.executable, "-m", "mcore_compat", "run", "--select", RELEASES["0.18"], "--root", ROOT, "--suite", suite,
        "--inventory", inventory, "--report-dir", folder / "reports", "--cells-dir", cells, "--jobs", "1",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    seconds = time.monotonic() - started
    try:
        report = json.loads((folder / "reports" / "latest" / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Outcome(fault, False, f"no report, exit status {done.returncode}", seconds, done.stderr[-150:])
    (cell,) = report["cells"]
    kinds = sorted({finding["kind"] for finding in cell["findings"]})
    by = f"{cell['verdict']}: {', '.join(kinds)}" if kinds else cell["verdict"]
    green = done.returncode == 0
    right = cell["verdict"] == report["verdict"] == fault.verdict and green == (fault.verdict == "ok")
    caught = right and (not fault.finding or fault.finding in kinds)
    if caught:
        shutil.rmtree(folder)
    return Outcome(fault, caught, by, seconds, cell["reason"])


def _suite(fault: Fault, folder: Path) -> Path:
    tests = folder / "tests"
    if fault.replace:
        fault.plant(tests)
    else:
        shutil.copytree(ROOT / "tests" / "compat", tests / "compat", ignore=shutil.ignore_patterns("__pycache__"))
    suite = tests / "compat"
    for path in suite.glob("test_*.py"):
        if path.name not in KEPT:
            path.unlink()
    ids = [name for names in KEPT.values() for name in names]
    # Cut by settings, so that the conftest under test stays what it is but for the fault.
    (suite / "pytest.ini").write_text(f"[pytest]\naddopts = -k '{' or '.join(ids)}'\n", encoding="utf-8")
    return suite


def _inventory() -> str:
    checks = [(f"{file}::{name}", CASES[name]) for file, names in KEPT.items() for name in names]
    head = f'schema_version = 1\ncontrols = ["{CONTROL}"]\n\n'
    head += '[evidence]\ncpu = ["kernel_launches"]\nhook = ["hook_calls"]\n'
    return head + "".join(
        f'\n[[check]]\nid = "{check}"\ncases = {cases}\nlaunches_at_least = {cases}\n' for check, cases in checks
    )
