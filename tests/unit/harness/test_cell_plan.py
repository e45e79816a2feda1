"""Which cells a run judges."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.contract.rules.classes import classified, load_classified_matrix
from mcore_compat.errors import SelectionError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import Selection, Shard, github_matrix, plan_cells

DATA = Path(__file__).parents[3] / "compat_matrix"
MATRIX = load_classified_matrix(DATA)
IDS = [cell.id for cell in MATRIX.cells]


def ids(**selection):
    return [cell.id for cell in plan_cells(MATRIX, Selection(**selection))]


def test_all_by_default():
    assert ids() == IDS


def test_patterns_keep_the_order_of_the_matrix():
    assert ids(patterns=("0.19.*", "0.12.3", "0.19.2")) == [
        "0.12.3", "0.19.0", "0.19.2", "0.19.2-py313",
    ]  # fmt: skip


def test_classes_are_the_newest_of_each_and_both_backports():
    assert ids(classes=True) == [
        "0.12.3", "0.13.1", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2",
        "0.17.1-backport-honest", "0.17.1-backport-dishonest",
    ]  # fmt: skip


def test_a_place_with_one_interpreter_runs_the_cells_of_that_interpreter():
    """A GPU host and its bundle have one; the others are left out, also of a pattern that matches them."""
    assert ids(python="3.12") == [cell.id for cell in MATRIX.cells if cell.python == "3.12"]
    assert ids(python="3.10", patterns=("0.12.*",)) == ["0.12.3-py310"]
    assert ids(python="3.12", patterns=("0.12.*",)) == ["0.12.3"]
    with pytest.raises(SelectionError, match=r"for Python 3\.12; they are for 3\.10\.") as caught:
        ids(python="3.12", patterns=("*-py310",))
    assert "plan --github" in caught.value.next_step


def test_each_cell_has_the_class_that_its_contract_gives_it():
    classes = {cell.id: cell.contract_class for cell in MATRIX.cells}
    assert classes["0.13.1"] == classes["0.13.0"] == "0.13"
    assert classes["0.18.2"] == "0.18"
    assert classes["0.17.1"] == "0.17"
    assert classes["0.17.1-backport-honest"] == "0.17 backport-honest"
    assert classes["0.17.1-backport-dishonest"] == "0.17 backport-dishonest"


def test_another_suite_s_matrix_has_classes_too():
    classes = {cell.id: cell.contract_class for cell in load_classified_matrix(DATA / "ecosystem").cells}
    assert classes["0.17.1-verl"] == "0.17 verl"
    assert classes["0.19.2-peft"] == "0.19 peft"


def test_what_has_no_contract_is_a_class_of_its_own():
    """Nothing says what an unknown release or another source equals, so it is never left out."""
    plain = load_matrix(DATA / "matrix.toml")
    releases = [cell.id for cell in plain.cells if cell.python == plain.python]
    assert [cell.id for cell in plan_cells(classified(plain, {}), Selection(classes=True))] == releases
    known = {"0.18.2": "0.18", "0.18.0": "0.18"}
    fork = plain.cell("0.18.2").model_copy(update={"id": "fork", "source": "/srv/fork.whl"})
    cells = classified(plain.model_copy(update={"cells": (*plain.cells, fork)}), known).cells
    assert {cell.contract_class for cell in cells if cell.megatron_core == "0.18.2"} == {"0.18", "0.18 fork"}


def test_a_matrix_without_classes_is_not_planned_by_class():
    with pytest.raises(AssertionError, match="without its contract classes"):
        plan_cells(load_matrix(DATA / "matrix.toml"), Selection(classes=True))


@pytest.mark.parametrize("pattern", ["0.18.1", "0.20.0", "x*", "hook"])
def test_an_unknown_version_is_refused_with_its_neighbours(pattern):
    with pytest.raises(SelectionError) as caught:
        ids(patterns=(pattern,))
    assert pattern in caught.value.problem
    assert any(known in caught.value.next_step for known in IDS)


@given(st.integers(1, len(IDS)))
def test_shards_are_a_fair_partition(count):
    shards = [ids(shard=Shard(index, count)) for index in range(1, count + 1)]
    assert sorted(cell for shard in shards for cell in shard) == sorted(IDS)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_no_shard(text):
    with pytest.raises(SelectionError, match="i/n"):
        Shard.parse(text)


def test_an_empty_shard_is_refused():
    with pytest.raises(SelectionError, match="at most 1 shards"):
        ids(patterns=("0.18.2",), shard=Shard.parse("2/2"))


def test_the_github_matrix_is_one_line_with_every_cell():
    text = github_matrix(plan_cells(MATRIX, Selection()))
    assert "\n" not in text
    assert [job["cell"] for job in json.loads(text)["include"]] == IDS
