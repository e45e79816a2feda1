"""Whose failure it is, by the stack; planted the other way round, each case must change sides."""

from __future__ import annotations

import json

import pytest

from mcore_compat.gate.blame import upstream_failures
from mcore_compat.gate.witness import _said

SUITE = "tests/compat/test_parallel.py"
MEGATRON = ".cells/candidate/venv/lib/python3.12/site-packages/megatron/core/transformer/multi_token_prediction.py"
OURS = ".cells/candidate/venv/lib/python3.12/site-packages/mcore_fused/head.py"


def _event(*frames: str, message: str = "TypeError: arg 2 must be a type", nodeid: str = f"{SUITE}::test_a[x]") -> str:
    entries = [{"data": {"reprfileloc": {"path": frame}}} for frame in frames]
    longrepr = {"reprtraceback": {"reprentries": entries}, "reprcrash": {"message": message}}
    return json.dumps({"nodeid": nodeid, "outcome": "failed", "longrepr": longrepr})


def _rank(*frames: str) -> str:
    listed = "".join(f'  File "/run/{frame}", line 7, in step\n    call()\n' for frame in frames)
    return f"Traceback (most recent call last):\n{listed}TypeError: arg 2 must be a type\n"


def _is_upstream(*lines: str) -> bool:
    found = upstream_failures(lines)
    assert found <= {f"{SUITE}::test_a"}
    return bool(found)


@pytest.mark.parametrize(
    ("frames", "upstream"),
    [((SUITE, MEGATRON), True), ((SUITE, OURS, MEGATRON), False), ((SUITE, MEGATRON, SUITE), False), ((), False)],
)
def test_a_failure_is_upstreams_where_it_ends_there_and_never_passed_ours(frames, upstream):
    """U3, verl#6927: whose code failed must be told, or the wrong project is searched."""
    assert _is_upstream(_event(*frames)) is upstream
    ranks = "AssertionError: rank 0: " + _rank(*frames)
    assert _is_upstream(_event(SUITE, "tests/compat/support/ranks.py", message=ranks)) is upstream


def test_one_rank_of_ours_is_enough_to_look_here():
    both = "AssertionError: rank 0: " + _rank(SUITE, MEGATRON) + "\nrank 1: "
    assert _is_upstream(_event(SUITE, message=both + _rank(SUITE, MEGATRON)))
    assert not _is_upstream(_event(SUITE, message=both + _rank(OURS, MEGATRON)))


def test_a_chained_traceback_is_judged_whole():
    """Upstream catches its own error and raises it again with more words: two tracebacks, both its own."""
    again = "\nDuring handling of the above exception, another exception occurred:\n\n"
    message = "AssertionError: rank 0: " + _rank(MEGATRON) + again
    assert _is_upstream(_event(SUITE, message=message + _rank(SUITE, MEGATRON)))
    assert not _is_upstream(_event(SUITE, message=message + _rank(SUITE, OURS)))


def test_one_case_of_ours_makes_the_check_ours():
    assert not _is_upstream(_event(SUITE, MEGATRON), _event(SUITE, OURS, nodeid=f"{SUITE}::test_a[y]"))
    assert _is_upstream("not json", _event(SUITE, MEGATRON), json.dumps({"outcome": "passed", "nodeid": "x"}))


@pytest.mark.parametrize(
    "line",
    [
        "[" * 200_000 + "]" * 200_000,
        "[1]",
        "7",
        '{"outcome": "failed", "nodeid": "a.py::b", "longrepr": {"reprtraceback": [1, 2]}}',
        '{"outcome": "failed", "nodeid": "a.py::b", "longrepr": {"reprtraceback": {"reprentries": [{"data": 3}]}}}',
    ],
    ids=["nested", "a list", "a number", "a list as traceback", "a number as data"],
)
def test_a_line_of_another_shape_blames_nobody(line):
    assert upstream_failures([line, ""]) == frozenset()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('[0, "pass", ""]', True),
        ('[0, "green", ""]', False),
        ('["0", "pass", ""]', False),
        ('[0, "pass"]', False),
        ('{"a": 1}', False),
        ("[" * 100_000, False),
        ('[0, "fail", 7]', False),
    ],
)
def test_only_the_driver_s_own_lines_are_outcomes(text, right):
    assert (_said(text) is not None) is right
