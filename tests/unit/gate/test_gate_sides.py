"""Which cells a gate runs, and how a candidate whose labels lie is placed by its surface."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from fake_upstream import edited

from mcore_compat.cli.main import main
from mcore_compat.contract.model import Contract, VersionLabels
from mcore_compat.contract.rules.compare import Finding, FindingState
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.errors import UsageError
from mcore_compat.gate.cells import baseline_version, candidate_cell, nearest_release
from mcore_compat.gate.sides import read_sides, refuse_same
from mcore_compat.gate.witness import Lines, Outcome, judge_witness, run_witnesses, witness_of
from mcore_compat.matrix.cells import Matrix, load_matrix
from mcore_compat.project import Project

ROOT = Path(__file__).parents[3]
DATA = ROOT / "compat_matrix"
MATRIX = load_matrix(DATA / "matrix.toml")
CONTRACTS = load_snapshots(DATA / "contracts")
RULES = load_rules(DATA / "rules")


@pytest.mark.parametrize("label", ["0.18.0rc1", "0.18.0.dev0", "0.18.0+abc1234", "0.1.0+vendor", None])
def test_a_candidate_is_placed_by_its_surface_not_by_its_label(tmp_path, label):
    known = CONTRACTS["0.18.2"]
    disguised = Contract("fork", VersionLabels(label, "9.9.9"), known.items)
    assert nearest_release(disguised, CONTRACTS) == "0.18.2"
    (tmp_path / "fork.whl").write_bytes(b"")
    candidate = parse_candidate("fork.whl", tmp_path)
    cell = candidate_cell(candidate, disguised, MATRIX, "0.18.2")
    assert (cell.id, cell.expected_mode, cell.megatron_core) == ("candidate", "hook", "0.18.2")
    assert cell.source == str(tmp_path / "fork.whl")


def test_a_candidate_brings_along_what_its_nearest_release_needs():
    contract = CONTRACTS["0.15.3"]
    cell = candidate_cell(parse_candidate("git+https://host/x/y@main"), contract, MATRIX, "0.15.3")
    assert [variable.name for variable in cell.env] == ["TORCH_CUDA_ARCH_LIST"]
    assert cell.expected_mode == "legacy"


def test_a_release_of_the_matrix_keeps_its_own_cell():
    assert candidate_cell(parse_candidate("0.19.2"), CONTRACTS["0.19.2"], MATRIX, "0.19.2").id == "0.19.2"
    unknown = candidate_cell(parse_candidate("0.20.0"), CONTRACTS["0.19.2"], MATRIX, "0.19.2")
    assert (unknown.source, unknown.megatron_requirement) == (None, "megatron-core==0.20.0")


def test_a_known_release_is_nearest_to_itself():
    """0.18.0 and 0.18.2 have one surface; naming the other one says something about 0.18.0 that is not so."""
    sides = read_sides(Project.at(ROOT), "0.18.0", "0.17.1", ())
    assert nearest_release(sides.new, sides.snapshots) == "0.18.2"
    assert sides.nearest == "0.18.0"


def test_the_baseline_is_the_newest_release_of_the_matrix():
    assert baseline_version(MATRIX, ()) == "0.19.2"
    assert baseline_version(MATRIX, (), "0.19.2") == "0.19.0"
    with pytest.raises(UsageError):
        baseline_version(Matrix(python="3.12", requirements=(), cells=()), ())


def test_a_candidate_is_not_compared_with_itself():
    with pytest.raises(UsageError, match=r"both megatron-core 0\.18\.2"):
        refuse_same(read_sides(Project.at(ROOT), "0.18.2", "megatron-core==0.18.2", ()))


def test_an_unknown_rule_finding_has_no_witness_and_others_are_filled_in():
    by_id = {rule.id: rule for rule in RULES}
    bare = Finding(by_id["python-changed"], "metadata.requires-python", "x", FindingState.NEW, None, None)
    assert witness_of(bare) is None
    full = Finding(by_id["forward-requires"], "gpt.forward", "loss_scale", FindingState.NEW, None, None)
    lines = witness_of(full)
    assert lines is not None
    assert '.get("loss_scale")' in lines.source
    assert "def trace_forward" in lines.source
    compile(lines.source, "witness", "exec")


def test_a_witness_confirms_only_what_changes_sides():
    good, bad, lost = Outcome("pass"), Outcome("fail"), Outcome("error")
    assert judge_witness(FindingState.NEW, good, bad) == "confirmed"
    assert judge_witness(FindingState.NEW, good, good) == "refuted"
    assert judge_witness(FindingState.NEW, bad, bad) == "refuted"
    assert judge_witness(FindingState.FIXED, bad, good) == "confirmed"
    assert judge_witness(FindingState.NEW, good, lost) == "inconclusive"


def test_witnesses_run_apart_from_each_other_and_without_the_caller_s_secrets(tmp_path):
    binary = tmp_path / "cell" / "venv" / "bin"
    binary.mkdir(parents=True)
    (tmp_path / "cell" / "home").mkdir()
    (binary / "python").symlink_to(sys.executable)
    lines = [
        Lines("import builtins; builtins.leak = 1"),
        Lines("import builtins; assert not hasattr(builtins, 'leak')"),
        Lines("assert False, 'seen'"),
        Lines("import os; assert 'SECRET_TOKEN' not in os.environ", isolated=True),
        Lines("raise ValueError('odd')"),
        Lines("import os; os._exit(3)"),
        Lines("def look(found):\n    assert found == 1\n\nlook(2)"),
        Lines("None > 0"),
        Lines("None > 0", fails_with="TypeError"),
        Lines("import nowhere", fails_with="ImportError"),
    ]
    host = {**os.environ, "SECRET_TOKEN": "x"}
    outcomes = run_witnesses(lines, MATRIX.cells[0], tmp_path / "cell", host)
    assert [o.result for o in outcomes] == [
        "pass",
        "pass",
        "fail",
        "pass",
        "error",
        "error",
        "fail",
        "error",
        "fail",
        "fail",
    ]
    assert outcomes[2].note == "AssertionError: seen"
    assert outcomes[6].note == "AssertionError: assert found == 1", "a bare assert is told by its own line"


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """The command line in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["mcore-compat", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_judges_without_running_when_asked_to(tmp_path, monkeypatch, capsys):
    tree = edited(("labels=labels, context=output", "context=output")).files
    for name, text in tree.items():
        (tmp_path / "fork" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fork" / name).write_text(text)
    paths = ["--root", str(ROOT), "--report-dir", str(tmp_path / "reports")]
    code, out, _ = call(monkeypatch, capsys, "gate", str(tmp_path / "fork"), "--static", "--baseline", "0.18.2", *paths)
    assert code == 1
    assert "\nBREAK (failed): " in out
    assert "hook-keyword-missing" in out
    (written,) = (tmp_path / "reports").rglob("gate.json")
    assert json.loads(written.read_text())["verdict"] == "break"
    assert str(tmp_path) not in out + written.read_text() + written.with_suffix(".md").read_text()


@pytest.mark.parametrize("text", ["/no/such.whl", "numpy==1.0", "git+file:///no/where@main", "0.99.0"])
def test_bad_candidates_end_in_two_lines_and_write_nothing(tmp_path, monkeypatch, capsys, text):
    paths = ["--root", str(ROOT), "--report-dir", str(tmp_path / "r")]
    code, out, err = call(monkeypatch, capsys, "gate", text, *paths)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "\nnext:  " in err
    assert "Traceback" not in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["contract", "diff", "0.18.0", "0.18.2"], 0, "ok: nothing that we depend on changed"),
        (["contract", "diff", "0.18.0", "0.17.1", "-f", "markdown"], 0, "#### hook mode"),
        (["contract", "check", "0.19.2", "-f", "json"], 0, '"modes": {\n  "gpt": "hook"'),
        (["contract", "check", "0.18.0", "--baseline", "0.17.1", "--all"], 0, "gpt.forward gained `output_processor`"),
        (["contract", "show", "0.12.3"], 0, "replace   gpt.head = forward"),
        (["contract", "classes"], 0, "0.18       0.18.0, 0.18.2"),
        (["releases", "--latest", "--python", "3.11"], 0, "0.16.1"),
        (["releases"], 0, "0.18.1     2026-06-22  wheel      yanked: wrong version"),
        (["bisect", "--good", "0.12.3", "--bad", "0.19.2", "--item", "gpt.hook"], 0, "first: 0.18.0"),
    ],
)
def test_the_static_commands(monkeypatch, capsys, arguments, code, said):
    ended, out, _ = call(monkeypatch, capsys, *arguments, "--root", str(ROOT))
    assert ended == code
    assert said in out


def test_a_yanked_release_is_known_as_one():
    sides = read_sides(Project.at(ROOT), "0.18.2", "0.18.0", ())
    assert sides.withdrawn["0.18.1"].startswith("yanked: ")
    assert not {sides.baseline.version, sides.candidate.version} & sides.withdrawn.keys()
