"""The inventory: derived from what ran, it declares exactly that; and it can be written and read back."""

import ast
from pathlib import Path

import harness_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.errors import ExpectationError, InventoryError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.expectations import load_expectations
from mcore_compat.matrix.inventory import Inventory, derive, load_inventory, write_text
from mcore_compat.versions import agree, within

ROOT = Path(__file__).parents[3]
CELLS = load_matrix(ROOT / "compat_matrix" / "matrix.toml").cells
CHECK_IDS = ["test_a.py::test_one", "test_a.py::TestX::test_two", "sub/test_b.py::test_three"]

ran = st.dictionaries(
    st.sampled_from([cell.id for cell in CELLS]), st.sets(st.sampled_from(CHECK_IDS)), min_size=1
).filter(lambda found: any(found.values()))


@given(ran)
def test_what_is_derived_declares_what_ran(tmp_path_factory, executed):
    path = tmp_path_factory.mktemp("inventory") / "inventory.toml"
    path.write_text(write_text(derive(executed, CELLS, None)), encoding="utf-8")
    inventory = load_inventory(path)
    for cell in CELLS:
        if cell.id in executed:
            assert inventory.declared(cell) == executed[cell.id]


@given(ran)
def test_deriving_again_changes_nothing(executed):
    once = derive(executed, CELLS, None)
    assert derive(executed, CELLS, once) == once


def test_bounds_are_preferred_to_lists():
    executed = {cell.id: ["t.py::test_all"] for cell in CELLS}
    for cell in CELLS:
        if within(cell.megatron_core, "0.17.0", None):
            executed[cell.id] = ["t.py::test_all", "t.py::test_mup"]
    inventory = derive(executed, CELLS, None)
    assert [check.model_dump(exclude_defaults=True) for check in inventory.check] == [
        {"id": "t.py::test_all"},
        {"id": "t.py::test_mup", "since": "0.17.0"},
    ]


def test_tags_choose_cells():
    inventory = Inventory.model_validate(
        {"schema_version": 1, "check": [{"id": "t.py::test_x", "only": ["hook"], "except": ["backport"]}]}
    )
    assert inventory.declared(build.cell()) == {"t.py::test_x"}
    assert not inventory.declared(build.cell(tags=["backport"]))
    assert not inventory.declared(build.cell("0.17.1", expected_mode="legacy"))


@pytest.mark.parametrize(
    ("label", "since", "until", "inside"),
    [
        ("0.18.0rc1", "0.18.0", None, True),
        ("0.18.0.dev0", "0.18.0", None, True),
        ("0.18.0+1d78d85", "0.18", "0.18.1", True),
        ("0.17.0.dev0", "0.18.0", None, False),
        ("0.9.0", "0.18.0", None, False),
        ("0.18.0", None, "0.18.0", False),
        ("core_v0.18.0", "0.19", None, True),
    ],
)
def test_bounds_compare_release_numbers(label, since, until, inside):
    assert within(label, since, until) is inside


@pytest.mark.parametrize(
    ("requested", "found", "same"),
    [
        ("2.11.0", "2.11.0+cu130", True),
        ("2.11.0+cpu", "2.11.0+cu130", False),
        ("0.18.0", "0.18.0rc1", False),
        ("0.18.0", "0.18", True),
        ("0.18.0-dirty", "0.18.0", False),
    ],
)
def test_versions_agree(requested, found, same):
    assert agree(requested, found) is same


@pytest.mark.parametrize(
    "text",
    [
        'schema_version = 1\n[[check]]\nid = "t.py::test_x"\n[[check]]\nid = "t.py::test_x"\n',
        'schema_version = 1\n[[check]]\nid = "t.py"\n',
        "schema_version = 1\ncheck = []\n",
        'schema_version = 1\n[evidence]\ncpu = ["luck"]\n[[check]]\nid = "t.py::test_x"\n',
        'schema_version = 1\n[[check]]\nid = "t.py::test_x"\nsince = "new"\n',
    ],
)
def test_a_wrong_inventory_is_refused(text, tmp_path):
    path = tmp_path / "inventory.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InventoryError, match=r"inventory\.toml"):
        load_inventory(path)


GOOD = '[[expectation]]\ncell = "0.15.*"\ncheck = "t.py::test_x"\nkind = "fail"\nreason = "broken upstream"\n'
FAILURE = 'failure = "TypeError: unexpected"\n'
REST = 'link = "https://x.org/1"\nexpires = 2027-01-01\n'


@pytest.mark.parametrize(
    "rest", ["", 'link = "https://x.org/1"\n', "expires = 2027-01-01\n", 'link = "x"\nexpires = 2027-01-01\n']
)
def test_an_exception_needs_link_and_expiry(rest, tmp_path):
    path = tmp_path / "expectations.toml"
    path.write_text(f"schema_version = 1\n{GOOD}{FAILURE}{rest}", encoding="utf-8")
    with pytest.raises(ExpectationError, match=r"expectations\.toml, line"):
        load_expectations(path)


@pytest.mark.parametrize("failure", ["", 'failure = "a("\n', 'failure = "un(closed"\n', f'{FAILURE}kind = "skip"\n'])
def test_an_expected_failure_says_which_one_it_is(failure, tmp_path):
    entry = GOOD.replace('kind = "fail"\n', "") if "kind" in failure else GOOD
    path = tmp_path / "expectations.toml"
    path.write_text(f"schema_version = 1\n{entry}{failure}{REST}", encoding="utf-8")
    with pytest.raises(ExpectationError, match=r"expectations\.toml"):
        load_expectations(path)
    path.write_text(f"schema_version = 1\n{GOOD}{FAILURE}{REST}", encoding="utf-8")
    assert load_expectations(path).expectation[0].is_meant("x\nTypeError: unexpected keyword")


def written_checks():
    """What the suite's files define, read without importing them."""
    for path in sorted((ROOT / "tests" / "compat").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.name}::{node.name}"
            # A Hypothesis state machine is published as `TestX = Machine.TestCase`, perhaps with a mark around it.
            value = getattr(node, "value", None)
            inner = value.args[0] if isinstance(value, ast.Call) and value.args else value
            if isinstance(node, ast.Assign) and getattr(inner, "attr", None) == "TestCase":
                yield f"{path.name}::{node.targets[0].id}::runTest"


def test_every_check_of_the_suite_is_declared_and_no_other():
    declared = {check.id for check in load_inventory(ROOT / "compat_matrix" / "inventory.toml").check}
    assert declared == set(written_checks()), "add entries to inventory.toml, or derive it: inventory --collect --write"


def test_the_committed_files_are_valid():
    assert load_inventory(ROOT / "compat_matrix" / "inventory.toml").check
    load_expectations(ROOT / "compat_matrix" / "expectations.toml")
