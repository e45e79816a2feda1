"""Open branches of upstream's: told is what a branch itself changes, whatever main has done since."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_upstream import edited
from test_sources import run_git, write_tree
from typer.testing import CliRunner

from mcore_compat.cli.contract import app
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.scan import as_line, scan
from mcore_compat.contract.source.git import GitError

ROOT = Path(__file__).parents[3]
RULES = load_rules(ROOT / "compat_matrix" / "rules")
# Calls the hook without labels.
BREAKING = ("labels=labels, context=output", "context=output")


def _commit(folder: Path, message: str) -> None:
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-q", "--allow-empty", "-m", message)


def _write(folder: Path, *changes: tuple[str, str]) -> None:
    for name, text in edited(*changes).files.items():
        (folder / name).write_text(text)


@pytest.fixture
def upstream(tmp_path):
    """Main has moved on by a breaking change; of three branches from before it, one breaks something else."""
    folder = write_tree(tmp_path / "upstream")
    run_git(tmp_path, "init", "-q", "-b", "main", "upstream")
    _commit(folder, "first")
    for name in ("old", "readme", "breaks", "broken"):
        run_git(folder, "branch", name)
    run_git(folder, "checkout", "-q", "readme")
    (folder / "README.md").write_text("text")
    _commit(folder, "a text")
    run_git(folder, "checkout", "-q", "breaks")
    _write(folder, BREAKING)
    _commit(folder, "Simplify the hook")
    run_git(folder, "checkout", "-q", "broken")
    (folder / "megatron/core/models/gpt/gpt_model.py").write_text("def (:\n")
    _commit(folder, "does not parse")
    run_git(folder, "checkout", "-q", "main")
    _write(folder, ("def _postprocess(", "def _finish("))
    _commit(folder, "main moves on")
    return folder


def test_only_what_a_branch_changes_itself_is_told(upstream):
    found = {branch.ref: branch for branch in scan(upstream, ["refs/heads"], ["main"], RULES)}
    assert set(found) == {"main", "old", "readme", "breaks", "broken"}
    assert {ref: branch.level for ref, branch in found.items() if not branch.problem} == {
        "main": None,
        "old": None,
        "readme": None,
        "breaks": "break",
    }
    assert [finding.rule.id for finding in found["breaks"].findings] == ["hook-keyword-missing"]
    assert as_line(found["breaks"]).startswith("break    breaks  20")
    assert as_line(found["breaks"]).endswith("Simplify the hook")
    assert "gpt_model.py" in found["broken"].problem, "one that cannot be read does not end the scan"
    assert as_line(found["broken"]).startswith("not read broken")


def test_two_names_of_one_commit_are_one_branch(upstream):
    run_git(upstream, "update-ref", "refs/pull/7/head", "breaks")
    run_git(upstream, "branch", "-D", "breaks")
    run_git(upstream, "update-ref", "refs/pull/8/head", "refs/pull/7/head")
    (branch,) = scan(upstream, ["refs/pull/*/head"], ["main"], RULES)
    assert branch.ref in {"pull/7/head", "pull/8/head"}


def test_the_nearest_start_counts(upstream):
    """A branch from a long-lived second line is not blamed for what that line has and main has not."""
    run_git(upstream, "checkout", "-q", "-b", "dev", "breaks")
    run_git(upstream, "checkout", "-q", "-b", "feature")
    (upstream / "megatron/core/new.py").write_text("x = 1\n")
    _commit(upstream, "feature")
    for onto, level in ((["main"], "break"), (["main", "dev"], None)):
        (branch,) = scan(upstream, ["refs/heads/feature"], onto, RULES)
        assert branch.level == level


def test_what_is_not_there_is_refused(upstream, tmp_path):
    with pytest.raises(GitError, match="no ref that matches refs/pull"):
        list(scan(upstream, ["refs/pull/*/head"], ["main"], RULES))
    with pytest.raises(GitError, match="no commit 'dev'"):
        list(scan(upstream, ["refs/heads"], ["main", "dev"], RULES))
    with pytest.raises(GitError, match="not a git repository"):
        list(scan(tmp_path / "nowhere", ["refs/heads"], ["main"], RULES))
    run_git(upstream, "checkout", "-q", "--orphan", "alone")
    _commit(upstream, "another history")
    (branch,) = scan(upstream, ["refs/heads/alone"], ["main"], RULES)
    assert "has no history in common with main" in branch.problem


def test_the_command_tells_branches_that_concern_us_and_counts_all(upstream):
    arguments = ["scan", str(upstream), "--refs", "refs/heads", "--root", str(ROOT)]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0
    assert "Simplify the hook" in told.output
    assert "[break] the hook does not hand over `labels`" in told.output
    assert "at megatron/core/models/gpt/gpt_model.py:" in told.output
    assert "a text" not in told.output
    assert told.output.splitlines()[-1] == "5 branches: 1 break, 1 not read, 3 nothing"
    assert "a text" in CliRunner().invoke(app, [*arguments, "--all"]).output
