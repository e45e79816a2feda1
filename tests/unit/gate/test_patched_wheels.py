"""Patched wheels are honest wheels but for one edit; and what the contract says of each, before anything is run."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest
from upstream_changes import WHEELS, Edit, patch_wheel

from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.rules.compare import FindingState, compare_contracts
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.tree import read_wheel
from mcore_compat.releases import download, find_release, load_releases

DATA = Path(__file__).parents[3] / "compat_matrix"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", "x = 1\ny = 1\n")
        archive.writestr("b.py", "z = 1\n")
        archive.writestr("a-1.dist-info/RECORD", "a.py,sha256=old,12\nb.py,sha256=kept,6\na-1.dist-info/RECORD,,\n")
    return path


def test_only_the_edited_file_and_its_line_of_record_change(wheel, tmp_path):
    made = patch_wheel(wheel, [Edit("a.py", "y = 1", "y = 2")], tmp_path / "out" / wheel.name)
    with zipfile.ZipFile(made) as archive:
        content = {name: archive.read(name).decode() for name in archive.namelist()}
    assert content["a.py"] == "x = 1\ny = 2\n"
    assert content["b.py"] == "z = 1\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(content["a.py"].encode()).digest()).rstrip(b"=").decode()
    assert content["a-1.dist-info/RECORD"].splitlines() == [
        f"a.py,sha256={digest},12", "b.py,sha256=kept,6", "a-1.dist-info/RECORD,,",
    ]  # fmt: skip
    again = patch_wheel(wheel, [Edit("a.py", "y = 1", "y = 2")], tmp_path / "again.whl")
    assert again.read_bytes() == made.read_bytes()


@pytest.mark.parametrize("edit", [Edit("a.py", "= 1", "= 2"), Edit("a.py", "q", "r"), Edit("c.py", "x", "y")])
def test_an_edit_that_does_not_fit_is_refused(wheel, tmp_path, edit):
    with pytest.raises(ValueError, match=r"there \d times|has no c.py"):
        patch_wheel(wheel, [edit], tmp_path / "out.whl")
    assert not (tmp_path / "out.whl").exists()


# New breaking findings by source; what witnesses and cells say of each is in docs/results/gate.
EXPECTED = {
    "hook-keyword-removed": {"hook-keyword-missing"},
    "hook-ignored": {"hook-ignored"},
    "postprocess-gone": {"head-missing"},
    "new-required-parameter": {"forward-requires"},
    "output-layer-renamed": {"head-not-output-layer", "hook-argument-other"},
}


@pytest.mark.network
@pytest.mark.parametrize("name", WHEELS)
def test_the_contract_names_what_was_changed(name, tmp_path):
    honest = download(find_release(load_releases(DATA / "releases.json"), "0.18.2"))
    made = patch_wheel(honest, WHEELS[name], tmp_path / honest.name)
    before = load_snapshots(DATA / "contracts")["0.18.2"]
    found = compare_contracts(before, extract(read_wheel(made), name), load_rules(DATA / "rules"))
    assert {f.rule.id for f in found if f.state is FindingState.NEW and f.level == "break"} == EXPECTED[name]
