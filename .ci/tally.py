"""Prints one closing line, ``N passed, N failed``, from the results of unit tests, cells, witnesses and planted faults.

Each part is told in a line of its own before; a confirmed witness and a planted fault that was caught count as passed.
"""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def unit(path: Path) -> tuple[int, int]:
    """Passed and failed unit tests; a missing file is a failure, never nothing."""
    if not path.is_file():
        return 0, 1
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    total, bad, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - bad - skipped, bad


def compat(path: Path) -> tuple[int, int]:
    """Passed and failed checks over all cells; a cell that is red without a failed check counts as one."""
    if not path.is_file():
        return 0, 1
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    passed = sum(cell["checks"]["passed"] for cell in cells)
    unexpected = [sum(r["outcome"] == "failed" and not r["expected"] for r in cell["results"]) for cell in cells]
    red = [cell["verdict"] not in {"ok", "drift"} for cell in cells]
    return passed, sum(max(bad, int(is_red)) for bad, is_red in zip(unexpected, red, strict=True))


def witnesses(path: Path) -> tuple[int, int]:
    """Confirmed and other witnesses; no file counts as one that is not."""
    if not path.is_file():
        return 0, 1
    counts = json.loads(path.read_text(encoding="utf-8"))
    return counts["confirmed"], len(counts["others"])


def faults(path: Path) -> tuple[int, int]:
    """Caught and missed faults; a check that fails without a fault counts as one more missed, and so does no file."""
    if not path.is_file():
        return 0, 1
    counts = json.loads(path.read_text(encoding="utf-8"))
    if counts["left_out"]:
        by_kind = ", ".join(f"{row['left_out']} {kind}" for kind, row in counts["kinds"].items() if row["left_out"])
        print(f"faults left out: {by_kind}")
    return counts["caught"], counts["planted"] - counts["caught"] + len(counts["failing_controls"])


def main() -> int:
    """Print each part, and the sum."""
    parts = {"unit tests": unit, "checks in cells": compat, "witnesses": witnesses, "planted faults": faults}
    counts = [read(Path(path)) for read, path in zip(parts.values(), sys.argv[1:], strict=True)]
    for name, (passed, failed) in zip(parts, counts, strict=True):
        print(f"{name}: {passed} passed, {failed} failed")
    passed, failed = (sum(pair[index] for pair in counts) for index in (0, 1))
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
