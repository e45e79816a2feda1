"""The harness's own pytest plugin, in a real pytest process with a small pretended ``megatron``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mcore_compat
from mcore_compat.run.suite_facts import read_facts, read_origins

ATTEMPT = "0123456789abcdef"
SRC = Path(mcore_compat.__file__).parents[1]


@pytest.fixture
def cell(tmp_path):
    package = tmp_path / "elsewhere" / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.17.0'\n", encoding="utf-8")
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_x.py").write_text("import megatron.core\n\ndef test_x():\n    pass\n", encoding="utf-8")
    return tmp_path


def run(cell, *arguments):
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(SRC), str(cell / "elsewhere")]),
        "MCORE_COMPAT_CELL_OUT": str(cell),
        "MCORE_COMPAT_ATTEMPT": ATTEMPT,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mcore_compat.run.pytest_plugin", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments, "suite"], cwd=cell, env=env, check=False, capture_output=True)


def test_a_module_from_elsewhere_is_seen(cell):
    assert run(cell).returncode == 0
    (origins,) = read_origins(cell.glob("origins-*.json"), ATTEMPT)
    assert origins.modules["megatron"] == 1
    assert list(origins.foreign) == ["megatron.core"]
    assert origins.foreign["megatron.core"].endswith("elsewhere/megatron/core/__init__.py")


def test_what_another_attempt_wrote_does_not_count(cell):
    assert run(cell).returncode == 0
    assert read_origins(cell.glob("origins-*.json"), "another") == ()


def test_a_suite_that_imports_nothing_shows_it(cell):
    (cell / "suite" / "test_x.py").write_text("def test_x():\n    pass\n", encoding="utf-8")
    run(cell)
    (origins,) = read_origins(cell.glob("origins-*.json"), ATTEMPT)
    assert origins.modules["megatron"] == 0
    assert origins.foreign == {}


FACTS = {
    "megatron_core": {"distribution": "0.18.2", "attribute": "0.18.2", "origin": "lib/x"},
    "python": "3.12.1",
    "torch": "2.11.0",
    "device": "cpu",
    "mode": "hook",
    "evidence": {"hook_calls": 1, "kernel_launches": 2},
    "collected": ["a.py::test_a"],
    "complete": True,
}


def write(folder, name, **changes):
    (folder / name).write_text(json.dumps(FACTS | changes), encoding="utf-8")


def test_facts_of_workers_are_summed(tmp_path):
    write(tmp_path, "facts.json", evidence={}, collected=[], mode=None)
    write(tmp_path, "facts.gw0.json")
    write(tmp_path, "facts.gw1.json", collected=["a.py::test_b"])
    facts, problem = read_facts(tmp_path)
    assert problem == ""
    assert (facts.evidence.hook_calls, facts.evidence.kernel_launches) == (2, 4)
    assert facts.collected == ("a.py::test_a", "a.py::test_b")
    assert (facts.mode, facts.complete) == ("hook", True)


@pytest.mark.parametrize("order", [("failed", "passed"), ("passed", "failed")])
def test_a_control_that_passed_in_one_worker_has_passed(tmp_path, order):
    for number, outcome in enumerate(order):
        write(tmp_path, f"facts.gw{number}.json", controls={"wrong_scale": outcome})
    assert read_facts(tmp_path)[0].controls == {"wrong_scale": "passed"}


def test_one_incomplete_worker_makes_the_facts_incomplete(tmp_path):
    write(tmp_path, "facts.gw0.json")
    write(tmp_path, "facts.gw1.json", complete=False)
    assert not read_facts(tmp_path)[0].complete


@pytest.mark.parametrize(
    ("content", "words"), [("{", "whole file"), ('{"python": 3}', "megatron_core"), (None, "no facts.json")]
)
def test_facts_that_cannot_be_used_say_why(content, words, tmp_path):
    if content is not None:
        (tmp_path / "facts.json").write_text(content, encoding="utf-8")
    facts, problem = read_facts(tmp_path)
    assert facts is None
    assert words in problem
