"""Public breakages: the uses of the source as it was before the commit that mended it, against releases as indexed.

``backtest/cases.toml`` names repository, commit and thread; the lists hold facts, no code;
``benchmarks/usage_backtest.py`` makes them again from clones.
"""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from test_backtest import side

from mcore_compat.usage.check import check_uses
from mcore_compat.usage.use_lists import load_use_lists

FOLDER = Path(__file__).with_name("backtest")
CASES = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))["case"]
# Told and all, by what upstream changed. Change it together with docs/results/downstreams/README.md.
RECALL = {
    "name": (11, 13),
    "keyword": (11, 12),
    "replacement": (1, 2),
    "order": (0, 1),
    "result": (0, 1),
    "behaviour": (0, 5),
}


def findings(case):
    [uses] = load_use_lists(FOLDER, [case["id"]])
    return check_uses(uses.extracted.uses, side(case["bad"]), side(case["good"]))


def told(case) -> bool:
    return any((f.rule, f.symbol, f.file) == (case["rule"], case["symbol"], case["file"]) for f in findings(case))


@pytest.mark.parametrize("case", [case for case in CASES if case["told"]], ids=lambda case: case["id"])
def test_a_public_breakage_is_told_with_the_release_that_brought_it(case):
    assert told(case)
    [uses] = load_use_lists(FOLDER, [case["id"]])
    free = check_uses(uses.extracted.uses, side(case["good"]), side(case["good"]))
    assert case["symbol"] not in {f.symbol for f in free}


def test_recall_by_kind():
    every = Counter(case["kind"] for case in CASES)
    found = Counter(case["kind"] for case in CASES if told(case))
    assert {kind: (found[kind], count) for kind, count in every.items()} == RECALL
    assert len(CASES) >= 25


def test_what_is_not_told_says_why():
    assert all(case["told"] or case["why"] for case in CASES)
