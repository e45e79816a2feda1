"""Prints one closing line, ``N passed, N failed``, from the unit tests' JUnit file and the compat run's report."""

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


def main() -> int:
    """Sum both and print."""
    counts = [unit(Path(sys.argv[1])), compat(Path(sys.argv[2]))]
    passed, failed = (sum(pair[index] for pair in counts) for index in (0, 1))
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
