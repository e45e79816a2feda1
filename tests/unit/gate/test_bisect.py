"""The first bad one: by binary search, over releases and over commits."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fake_upstream import FILES, GPT_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_compat.bisect.question import Question, question_for
from mcore_compat.bisect.run import bisect_commits, bisect_releases
from mcore_compat.bisect.search import NotBisectableError, first_bad
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.git import read_git
from mcore_compat.report import bisect_text as render
from mcore_compat.run.suite import SuiteOptions, _command

DATA = Path(__file__).parents[3] / "compat_matrix"
CONTRACTS = load_snapshots(DATA / "contracts")
RULES = load_rules(DATA / "rules")


@settings(deadline=None)
@given(st.integers(2, 60), st.data())
def test_the_first_bad_one_is_found_whatever_cannot_be_judged(length, data):
    turn = data.draw(st.integers(1, length - 1))
    unknown = data.draw(st.sets(st.integers(1, length - 2))) if length > 2 else set()
    line = [str(number) for number in range(length)]
    asked = []

    def is_bad(name):
        asked.append(name)
        return None if int(name) in unknown else int(name) >= turn

    found = first_bad(line, is_bad)
    assert int(found.good) < turn <= int(found.bad)
    assert all(int(name) in unknown for name in found.unknown)
    assert [int(name) for name in found.unknown] == list(range(int(found.good) + 1, int(found.bad)))
    assert len(asked) == len(set(asked)) == found.asked
    if not unknown:
        assert int(found.bad) == turn
        assert found.asked <= 2 + length.bit_length()


@pytest.mark.parametrize(
    ("line", "bad"), [(["a"], "a"), ([], ""), (["a", "b"], ""), (["a", "b"], "ab")], ids=["one", "none", "good", "bad"]
)
def test_ends_that_are_not_good_and_bad_are_refused(line, bad):
    with pytest.raises(NotBisectableError):
        first_bad(line, lambda name: name in bad)


def test_018_brought_the_hook():
    result = bisect_releases(CONTRACTS, RULES, Question("item", "gpt.hook"), "0.12.3", "0.19.2")
    assert (result.found.good, result.found.bad) == ("0.17.1", "0.18.0")
    words = render.text(result)
    assert words.startswith("first: 0.18.0\nlast before it: 0.17.1\n")
    assert "hook-absent" in words


def test_the_search_goes_backwards_too():
    result = bisect_releases(CONTRACTS, RULES, Question("rule", "hook-absent"), "0.19.2", "0.12.3")
    assert (result.found.good, result.found.bad) == ("0.18.0", "0.17.1")


def test_questions_without_an_answer_are_refused():
    old, new = CONTRACTS["0.18.0"], CONTRACTS["0.18.2"]
    for given_names in ({}, {"item": "no.such"}, {"rule": "no-such"}):
        with pytest.raises(NotBisectableError):
            question_for(RULES, old, new, **given_names)
    with pytest.raises(NotBisectableError, match="no committed contract"):
        bisect_releases(CONTRACTS, RULES, Question("item", "gpt.hook"), "0.1", "0.19.2")


def _repository(folder):
    """The fake upstream in git, and a function that calls git there."""

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "start")
    return git


def test_the_commit_that_took_a_keyword_away_is_named_with_its_change(tmp_path):
    folder = tmp_path / "upstream"
    target = folder / "megatron/core/models/gpt/gpt_model.py"
    git = _repository(folder)
    start = git("rev-parse", "HEAD")
    versions = [
        ("comment", GPT_MODEL + "# 1\n"),
        ("half-typed", GPT_MODEL + "def broken(:\n"),
        ("drop labels from the hook", GPT_MODEL.replace("labels=labels, context=output", "context=output")),
        ("another comment", GPT_MODEL.replace("labels=labels, context=output", "context=output") + "# 2\n"),
        ("a third", GPT_MODEL.replace("labels=labels, context=output", "context=output") + "# 3\n"),
    ]
    for subject, content in versions:
        target.write_text(content)
        git("commit", "-q", "-a", "-m", subject)
    ends = [extract(read_git(folder, ref), ref) for ref in (start, "main")]
    question = question_for(RULES, *ends)
    assert question == Question("level", "break")
    result = bisect_commits(folder, RULES, question, start, "main")
    # The commit that does not parse lies between; the first bad one that can be judged is named, the other told.
    assert result.source is not None
    assert result.source.endswith("drop labels from the hook")
    assert len(result.found.unknown) == 1
    assert result.findings[0].rule.id == "hook-keyword-missing"
    assert result.diff is not None
    assert "-                labels=labels, context" in result.diff
    assert str(tmp_path) not in render.text(result)


def test_a_check_that_fails_without_any_change_of_the_contract_names_the_commit_s_files(tmp_path):
    folder = tmp_path / "upstream"
    target = folder / "megatron/core/transformer/multi_token_prediction.py"
    git = _repository(folder)
    start = git("rev-parse", "HEAD")
    original = target.read_text()
    for number, line in enumerate(("# 1", "def broken(:", "# fails from here", "# fails from here, too")):
        target.write_text(f"{original}{line}\n")
        git("commit", "-q", "-a", "-m", f"change {number}")

    def run(commit):
        extract(read_git(folder, commit), commit)  # as the command line does, before it makes a cell
        return "fails" in git("show", f"{commit}:{target.relative_to(folder)}")

    question = Question("check", "test_a.py::test_b")
    result = bisect_commits(folder, RULES, question, start, "main", runner=run)
    assert result.source is not None
    assert result.source.endswith("change 2")
    assert len(result.found.unknown) == 1, "the commit that does not parse is gone around"
    assert not result.changes
    words = render.text(result)
    assert "searched for: check test_a.py::test_b fails when it is run (" in words
    assert "transformer/multi_token_prediction.py | 2 +-" in words


def test_a_check_is_run_alone(tmp_path):
    options = SuiteOptions(tmp_path, "ci", only="test_a.py::test_b")
    command = _command(Path("python"), options, tmp_path / "pytest.ini", tmp_path / "log")
    assert f"{tmp_path}/test_a.py::test_b" in command
    assert tmp_path not in command
    assert tmp_path in _command(Path("python"), SuiteOptions(tmp_path, "ci"), tmp_path / "i", tmp_path / "l")


def test_many_changed_items_are_cut_by_number_with_those_of_findings_first():
    result = bisect_releases(
        CONTRACTS, RULES, Question("check", "t"), "0.17.1", "0.18.0", lambda name: name == "0.18.0"
    )
    old, new = CONTRACTS["0.17.1"], CONTRACTS["0.18.0"]
    changed = [i for i in sorted({*old.items, *new.items}) if old.value(i) != new.value(i)]
    result = replace(result, changes=tuple((i, old.value(i), new.value(i)) for i in changed))
    words = render.text(result)
    shown = [line.strip() for line in words.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    assert len(shown) == 11
    assert shown[-1].startswith(f"… and {len(result.changes) - 10} more: ")
    assert {"gpt.hook", "imports.triton"} & set(shown[:10])


def test_a_check_is_explained_by_what_may_concern_it():
    result = bisect_releases(
        CONTRACTS, RULES, Question("check", "t"), "0.17.1", "0.18.0", lambda name: name == "0.18.0"
    )
    assert {finding.level for finding in result.findings} <= {"break", "drift"}
    assert {item for item, *_ in result.changes} == {finding.item for finding in result.findings}
    assert f"{result.others} other contract items changed" in render.text(result)
    assert result.others > 10
