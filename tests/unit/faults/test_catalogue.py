"""The catalogue of planted faults stands: every text to replace is still there, every named check exists.

This is what a change of the source meets first; whether each fault is caught, ``nox -s faults`` says.
"""

import ast
import re
from pathlib import Path

import catalogue
import pytest
from catalogue import Fault
from places import judged

ROOT = Path(__file__).parents[3]
FAULTS = {fault.id: fault for fault in catalogue.load()}


@pytest.mark.parametrize("name", FAULTS)
def test_it_can_be_planted(name):
    assert FAULTS[name].problem() == ""


def test_there_are_enough_of_every_kind():
    of = [fault.place for fault in FAULTS.values()]
    assert len(FAULTS) >= 40
    assert {place: of.count(place) >= 5 for place in catalogue.PLACES} == dict.fromkeys(catalogue.PLACES, True)


@pytest.mark.parametrize("name", FAULTS)
def test_it_says_what_it_models(name):
    fault = FAULTS[name]
    assert fault.what.endswith(".")
    assert re.search(r"^[\w.-]+/[\w.-]+#\d+$|^hazard: .+|^FACTS of the field: .+|^issue 5: .+", fault.models)


def _checks(path):
    """Ids of the checks in a file, classes and the state machine's test case included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
              if isinstance(target, ast.Name)}  # fmt: skip
    inside = {f"{node.name}::{part.name}" for node in tree.body if isinstance(node, ast.ClassDef)
              for part in node.body if isinstance(part, ast.FunctionDef)}  # fmt: skip
    return found | inside


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.caught_by])
def test_the_checks_that_must_catch_it_exist(name):
    for check in FAULTS[name].caught_by:
        file, _, inside = check.partition("::")
        assert inside in _checks(ROOT / "tests" / file) | {""}


def planted(**changes):
    fields = {
        "id": "x",
        "what": "",
        "models": "",
        "place": "0.18",
        "file": "f.py",
        "replace": (("a", "b"),),
        "caught_by": ("compat/test_a.py::test_one",),
    }
    return Fault(**(fields | changes))


FAILED = ["compat/test_a.py::test_one[auto]", "call", "assert 1 == 2"]


@pytest.mark.parametrize(
    ("answer", "caught"),
    [
        ({"status": 1, "failed": [FAILED]}, True),
        ({"status": 1, "failed": [["test_a.py::test_one", "teardown", "left behind"]]}, True),
        ({"status": 0, "failed": []}, False),
        ({"status": 1, "failed": [["compat/test_a.py::test_two", "call", ""]]}, False),
        ({"status": 1, "failed": [["compat/test_b.py::test_one", "call", ""]]}, False),
        ({"status": 2, "failed": [["compat/test_a.py", "collect", "ImportError"]]}, False),
        ({"status": 5, "failed": []}, False),
        ({"status": -1, "failed": [], "why": "time"}, False),
        ({"status": 1, "failed": [FAILED], "strangers": ["/elsewhere/mcore_fused/__init__.py"]}, False),
    ],
)
def test_only_a_named_check_that_fails_catches(answer, caught):
    """A copy that cannot be imported, a crash or another failing check would make any fault look caught."""
    assert judged(planted(), answer).caught is caught


def test_the_control_must_pass():
    assert judged(planted(replace=()), {"status": 0, "failed": [], "passed": 3}).caught
    assert not judged(planted(replace=()), {"status": 1, "failed": [FAILED]}).caught


def test_a_text_that_is_gone_or_doubled_cannot_be_planted(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "f.py").write_text("a = 1\n", encoding="utf-8")
    assert planted().edited(tmp_path) == "b = 1\n"
    for text in ("c = 1\n", "a = 1\na = 2\n"):
        (tmp_path / "src" / "f.py").write_text(text, encoding="utf-8")
        with pytest.raises(catalogue.CatalogueError, match=r"stands [02] times"):
            planted().edited(tmp_path)
