"""``contract snapshot --check``: what differs is a break, what cannot be had is not passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_upstream import edited

from mcore_compat.cli import contract as contract_cli
from mcore_compat.cli.main import main
from mcore_compat.contract.extract.surface import extract
from mcore_compat.releases import IndexUnreachableError
from mcore_compat.releases import index as index_module

DATA = Path(__file__).parents[3] / "compat_matrix"
NAMES = ("0.18.0", "0.18.2", "0.19.2")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A root with three snapshots of one small megatron-core, and a set of versions that the index does not give."""
    data = tmp_path / "compat_matrix"
    (data / "contracts").mkdir(parents=True)
    (data / "rules").mkdir()
    shutil.copy(DATA / "releases.json", data)
    for name in NAMES:
        (data / "contracts" / f"{name}.json").write_text(extract(edited(), name).to_json())
    absent: set[str] = set()

    def open_candidate(candidate, releases):
        if candidate.version in absent:
            raise IndexUnreachableError("the index does not answer.", "wait.")
        return edited()

    monkeypatch.setattr(contract_cli, "open_candidate", open_candidate)
    return tmp_path, absent


def check(root: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["mcore-compat", "contract", "snapshot", "--check", "--root", str(root)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_equal_contracts_are_green(checkout, capsys):
    assert check(checkout[0]) == 0
    assert capsys.readouterr().out == "".join(f"{name}: same\n" for name in NAMES)


def test_a_release_that_cannot_be_had_is_named_and_the_others_are_compared(checkout, capsys):
    root, absent = checkout
    absent.add("0.18.2")
    assert check(root) == 3
    told = capsys.readouterr()
    assert told.out == "0.18.0: same\n0.18.2: not read, the index does not answer.\n0.19.2: same\n"
    assert "1 of 3 releases could not be read again" in told.err
    assert "PIP_INDEX_URL" in told.err


def test_a_contract_that_differs_is_a_break_also_where_others_cannot_be_had(checkout, capsys):
    root, absent = checkout
    absent.add("0.18.2")
    path = root / "compat_matrix" / "contracts" / "0.18.0.json"
    text = path.read_text()
    path.write_text(text.replace('"scale_logits"', '"scale"'))
    assert path.read_text() != text
    assert check(root) == 1
    told = capsys.readouterr()
    assert "0.18.0: differs" in told.out
    assert "snapshot 0.18.0" in told.err
    assert path.read_text() != text, "nothing is written by a check"


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_the_index_of_the_cells_is_the_index_of_the_contracts(monkeypatch, name):
    asked = []

    class Client:
        def __init__(self, address):
            asked.append(address)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def get_project_page(self, project, timeout):
            raise ValueError("no page")

    monkeypatch.setattr(index_module, "PyPISimple", Client)
    for other in index_module._INDEX_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    for value in ("", "http://127.0.0.1:9/simple/"):
        monkeypatch.setenv(name, value)
        with pytest.raises(IndexUnreachableError):
            index_module.fetch_releases()
    assert asked == [index_module.PYPI_SIMPLE_ENDPOINT, "http://127.0.0.1:9/simple/"]


def test_a_release_of_the_matrix_without_a_snapshot_is_stale(checkout, capsys):
    """Nothing else would say that a new release has no contract."""
    root, _ = checkout
    text = (DATA / "matrix.toml").read_text()
    head, *cells = text.split("[[cell]]\n")
    kept = [cell for cell in cells if 'id = "0.19.0"' in cell or 'id = "0.19.2"' in cell]
    (root / "compat_matrix" / "matrix.toml").write_text("[[cell]]\n".join([head, *kept]))
    assert check(root) == 1
    assert capsys.readouterr().out == "0.18.0: same\n0.18.2: same\n0.19.0: differs\n0.19.2: same\n"
