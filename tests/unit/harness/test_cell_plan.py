"""Which cells a run judges."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.errors import SelectionError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import Selection, Shard, github_matrix, plan_cells

MATRIX = load_matrix(Path(__file__).parents[3] / "compat_matrix" / "matrix.toml")
IDS = [cell.id for cell in MATRIX.cells]


def ids(**selection):
    return [cell.id for cell in plan_cells(MATRIX, Selection(**selection))]


def test_all_by_default():
    assert ids() == IDS


def test_patterns_keep_the_order_of_the_matrix():
    assert ids(patterns=("0.19.*", "0.12.3", "0.19.2")) == ["0.12.3", "0.19.0", "0.19.2"]


def test_classes_are_the_newest_of_each_and_both_backports():
    assert ids(classes=True) == [
        "0.12.3", "0.15.3", "0.16.1", "0.17.1", "0.19.2", "0.17.1-backport-honest", "0.17.1-backport-dishonest",
    ]  # fmt: skip


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
