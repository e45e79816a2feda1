"""The matrix file: what is committed is true, and a wrong one ends in one clear message."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.errors import MatrixError
from mcore_compat.matrix import toml_file as datafile
from mcore_compat.matrix.cells import load_matrix

ROOT = Path(__file__).parents[3]
PATH = ROOT / "compat_matrix" / "matrix.toml"
TEXT = PATH.read_text(encoding="utf-8")

# Every final release from 0.12.3 to 0.19.2 that was not withdrawn; 0.18.1 and 0.19.1 were.
RELEASES = [
    "0.12.3",
    "0.13.0",
    "0.13.1",
    "0.14.0",
    "0.15.0",
    "0.15.1",
    "0.15.2",
    "0.15.3",
    "0.16.0",
    "0.16.1",
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.18.2",
    "0.19.0",
    "0.19.2",
]


def test_every_release_and_both_backports_are_there():
    matrix = load_matrix(PATH)
    backports = [cell for cell in matrix.cells if "backport" in cell.tags]
    others = [cell for cell in matrix.cells if cell.python != matrix.python]
    cells = [cell for cell in matrix.cells if cell not in others]
    assert [cell.id for cell in cells if cell not in backports] == RELEASES
    assert sorted(cell.python for cell in others) == ["3.10", "3.11", "3.13"]
    assert all(cell.id == f"{cell.megatron_core}-py{cell.python.replace('.', '')}" for cell in others)
    assert [(cell.id, cell.megatron_core, cell.expected_mode) for cell in backports] == [
        ("0.17.1-backport-honest", "0.17.1", "hook"),
        ("0.17.1-backport-dishonest", "0.17.1", "legacy"),
    ]


def test_the_suite_needs_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(load_matrix(PATH).requirements) == sorted(project["optional-dependencies"]["suite"])


WRONG = {
    "duplicate id": ('id = "0.13.0"', 'id = "0.12.3"', "0.12.3", "twice"),
    "same recipe twice": (
        'id = "0.14.0"',
        ('id = "copy"\nmegatron_core = "0.16.0"\nexpected_mode = "legacy"\n\n[[cell]]\nid = "0.14.0"'),
        "0.16.0",
        "same environment",
    ),
    "mode": ('expected_mode = "hook"', 'expected_mode = "hok"', "expected_mode", "'hook' or 'legacy'"),
    "torch": ('torch = "2.11.0"', 'torch = "two"', "torch", "exact version"),
    "requirement": ("numpy<2.4", "numpy<<2.4", "spec", "not a requirement"),
    "unknown key": ("allow_sdist =", "allow_sdst =", "allow_sdst", "unknown key"),
    "type": ("time_limit_s = 600", 'time_limit_s = "600"', "time_limit_s", "integer"),
    "range": ("time_limit_s = 600", "time_limit_s = 1", "time_limit_s", "10"),
    "syntax": ("schema_version = 1", "schema_version = ", "line 4", "TOML"),
    "schema version": ("schema_version = 1", "schema_version = 2", "schema_version", "1"),
    "version": ('megatron_core = "0.14.0"', 'megatron_core = "new"', "new", "0.18.2"),
    "missing key": ('expected_mode = "legacy"\n', "", "expected_mode", "missing"),
    "a computed value": ('id = "0.14.0"', 'id = "0.14.0"\ncontract_class = "0.14"', "contract_class", "unknown key"),
    "no reason": (', reason = "0.13 imports packaging and does not declare it"', "", "reason", "missing"),
    "link": ("https://github.com/NVIDIA", "http://github.com/NVIDIA", "link", "https"),
    "variable": ('name = "MCORE_COMPAT_BACKPORT"', 'name = "mcore-compat"', "name", "capitals"),
    "id": ('id = "0.14.0"', 'id = "../0.14.0"', "id", "letters"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_names_place_and_remedy(fault, tmp_path):
    old, new, *words = WRONG[fault]
    assert old in TEXT
    path = tmp_path / "matrix.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(MatrixError) as caught:
        load_matrix(path)
    message = str(caught.value)
    assert message.startswith("matrix.toml")
    assert "line " in message
    assert "\n" not in message
    for word in words:
        assert word in message
    assert caught.value.exit_code == 2
    assert caught.value.next_step


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read(content, tmp_path):
    path = tmp_path / "matrix.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MatrixError, match=r"matrix\.toml"):
        load_matrix(path)


def test_lines_of_keys_are_those_of_the_file():
    lines = TEXT.splitlines()
    for number, cell in enumerate(tomllib.loads(TEXT)["cell"]):
        for key in cell:
            line = datafile.line_of(TEXT, ("cell", number, key))
            assert lines[line - 1].startswith(f"{key} = ")
        assert lines[datafile.line_of(TEXT, ("cell", number)) - 1] == "[[cell]]"


@given(st.integers(0, len(TEXT.splitlines()) - 1), st.sampled_from(["", "[[cell]]", "x = 1", 'id = "0.19.2"', "]"]))
def test_any_damaged_line_loads_or_ends_in_one_message(tmp_path_factory, number, replacement):
    lines = TEXT.splitlines()
    lines[number] = replacement
    path = tmp_path_factory.mktemp("matrix") / "matrix.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    message = ""
    try:
        load_matrix(path)
    except MatrixError as exc:
        message = str(exc)
    assert "\n" not in message
    assert message.startswith("matrix.toml") or not message
