"""Every witness has a place where it is confirmed by running; ``tests/witnesses/confirm.py`` does that."""

from __future__ import annotations

from pathlib import Path

import pytest
from upstream_changes import BASE, RELEASE_CHANGES, RULE_CHANGES

from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.contract.rules.compare import FindingState, compare_contracts
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.matrix.selection import Selection, plan_cells

ROOT = Path(__file__).parents[3]
RULES = {rule.id: rule for rule in load_rules(ROOT / "compat_matrix" / "rules")}
CONTRACTS = load_snapshots(ROOT / "compat_matrix" / "contracts")


def test_every_witness_has_a_place_and_no_place_is_left_over():
    witnessed = {name for name, rule in RULES.items() if rule.witness is not None}
    assert {*RULE_CHANGES, *RELEASE_CHANGES} == witnessed


def test_a_rule_that_breaks_has_a_witness_or_cannot_have_one():
    assert {name for name, rule in RULES.items() if rule.level == "break" and rule.witness is None} == {
        "python-excluded"
    }


@pytest.mark.parametrize("name", RELEASE_CHANGES)
def test_the_rule_speaks_of_those_two_releases(name):
    old, new = (CONTRACTS[version] for version in RELEASE_CHANGES[name])
    assert any(f.state is FindingState.NEW for f in compare_contracts(old, new, [RULES[name]]))


def test_the_environments_of_the_tests_session_are_enough():
    chosen = plan_cells(load_classified_matrix(ROOT / "compat_matrix"), Selection(classes=True))
    needed = {BASE, *(version for sides in RELEASE_CHANGES.values() for version in sides)}
    assert needed <= {cell.id for cell in chosen}


@pytest.mark.parametrize("name", RULE_CHANGES)
def test_an_edit_changes_something(name):
    assert all(edit.old and edit.old != edit.new for edit in RULE_CHANGES[name])
