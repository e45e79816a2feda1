"""Checks that this checkout has passed already: a run's control need not run them once more.

Reads the JUnit file of the unit tests and the report of a run of the property suite. Whoever names them says that they
are results of the same checkout; ``.ci/run`` removes older ones before it begins.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

from catalogue import Fault
from places import RELEASES

__all__ = ["Passed", "read_passed", "without_passed"]

# What passed, and what did not, by place; a check is named as the catalogue names it.
Passed = dict[str, dict[str, bool]]
_PLACES = {
    release: tuple(place for place, used in RELEASES.items() if used == release) for release in RELEASES.values()
}


def read_passed(files: Iterable[Path]) -> Passed:
    """Read JUnit files of unit tests (``.xml``) and reports of a run (``.json``)."""
    found: Passed = {}
    for path in files:
        for place, check, passed in _junit(path) if path.suffix == ".xml" else _report(path):
            checks = found.setdefault(place, {})
            checks[check] = checks.get(check, True) and passed
    return found


def without_passed(controls: Iterable[Fault], passed: Passed) -> list[Fault]:
    """The controls that are left: those with a check that is not known to pass, or with an environment of their own."""
    return [control for control in controls if control.env or not _known(control, passed.get(control.place, {}))]


def _known(control: Fault, passed: dict[str, bool]) -> bool:
    for named in control.caught_by:
        # A file or a class stands for every check in it.
        outcomes = [good for check, good in passed.items() if f"{check}::".startswith(f"{named}::")]
        if not outcomes or not all(outcomes):
            return False
    return True


def _junit(path: Path) -> Iterable[tuple[str, str, bool]]:
    for case in ET.parse(path).iter("testcase"):
        *folders, last = case.get("classname", "").removeprefix("tests.").split(".")
        inside: list[str] = []
        while last and not last.startswith("test_") and folders:  # a class, of a test in it
            inside.insert(0, last)
            last = folders.pop()
        file = "/".join([*folders, f"{last}.py"])
        check = "::".join([file, *inside, case.get("name", "").split("[")[0]])
        good = all(child.tag not in {"failure", "error", "skipped"} for child in case)
        for place in ("unit", "harness"):
            yield place, check, good


def _report(path: Path) -> Iterable[tuple[str, str, bool]]:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for place in _PLACES.get(cell["id"], ()):
            for result in cell["results"]:
                yield place, f"compat/{result['check']}", result["outcome"] == "passed"
