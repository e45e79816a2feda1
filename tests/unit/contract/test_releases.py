"""Discovery: from the index's answer to what an installer would take, and back to the committed file."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from pathlib import Path

import pytest
from pypi_simple import DistributionPackage

from mcore_compat.files.atomic import write_atomically
from mcore_compat.releases import (
    IndexUnreachableError,
    NoSuchReleaseError,
    Release,
    ReleaseFile,
    download,
    fetch_releases,
    find_release,
    latest,
    load_releases,
    merge,
    save_releases,
    unknown_to,
)
from mcore_compat.releases.index import release_of

COMMITTED = Path(__file__).parents[3] / "compat_matrix" / "releases.json"


def package(name: str, **given) -> DistributionPackage:
    kind = "wheel" if name.endswith(".whl") else "sdist"
    fields = {"version": "1.0", "digests": {"sha256": "0" * 64}, "requires_python": ">=3.10", "size": 5}
    fields |= {"upload_time": dt.datetime(2026, 5, 1, tzinfo=dt.UTC), "is_yanked": False, "yanked_reason": None} | given
    return DistributionPackage(
        filename=name, url="x", project="megatron-core", package_type=kind, has_sig=None, **fields
    )


def release(version: str, **given) -> Release:
    fields = {"requires_python": None, "uploaded": None, "yanked": None, "wheels": ("cp312",), "sdist": True}
    return Release(version=version, source=ReleaseFile("f.whl", "0" * 64, 1), **(fields | given))


def test_the_file_to_read_is_the_cp312_wheel_else_any_wheel_else_the_sdist():
    names = ["m-1.0.tar.gz", "m-1.0-cp310-cp310-manylinux_x86_64.whl", "m-1.0-cp312-cp312-manylinux_aarch64.whl",
             "m-1.0-cp312-cp312-manylinux_x86_64.whl"]  # fmt: skip
    for count, best in ((4, names[3]), (3, names[2]), (2, names[1]), (1, names[0])):
        found = release_of("1.0", [package(name) for name in names[:count]])
        assert found is not None
        assert found.source.filename == best
        assert found.sdist
        assert found.uploaded == "2026-05-01"


def test_files_without_a_hash_are_not_used():
    assert release_of("1.0", [package("m-1.0.tar.gz", digests={})]) is None


def test_a_release_is_yanked_when_all_its_files_are():
    both = [package("m-1.0.tar.gz", is_yanked=True, yanked_reason="bad"), package("m-1.0-py3-none-any.whl")]
    assert release_of("1.0", both).yanked is None
    assert release_of("1.0", both[:1]).yanked == "bad"


WHEEL = "megatron_core-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"
BUILT = "megatron_core-1.0-{}-cp312-cp312-manylinux_2_28_x86_64.whl"
SDIST = "megatron_core-1.0.tar.gz"


def test_a_yanked_file_is_not_read_while_another_is_not_yanked():
    found = release_of("1.0", [package(WHEEL, is_yanked=True, yanked_reason="broken"), package(SDIST)])
    assert (found.source.filename, found.yanked, found.wheels, found.sdist) == (SDIST, None, (), True)
    found = release_of("1.0", [package(WHEEL), package(SDIST, is_yanked=True)])
    assert (found.source.filename, found.yanked, found.wheels, found.sdist) == (WHEEL, None, ("cp312",), False)
    found = release_of("1.0", [package(WHEEL, is_yanked=True), package(SDIST, is_yanked=True, yanked_reason="bad")])
    assert (found.source.filename, found.yanked) == (WHEEL, "bad")


def test_a_build_tag_is_not_a_python_tag_and_the_highest_build_is_read():
    names = [WHEEL, BUILT.format(2), BUILT.format("10a")]
    found = release_of("1.0", [package(name) for name in names])
    assert found.wheels == ("cp312",)
    assert found.source.filename == names[-1]
    assert release_of("1.0", [package("nonsense.whl"), package(SDIST)]).source.filename == SDIST


BOUNDS = (">=3.12.1", ">3.12", "!=3.12.0", "~=3.12.1", "<=3.12", "==3.12", "==3.12.*", "<3.13", ">=3.10", None)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_is_judged_by_the_full_version_of_the_interpreter(bound, monkeypatch):
    """As uv takes them on 3.12.1, which was measured with one small wheel for each bound."""
    monkeypatch.setattr("platform.python_version", lambda: "3.12.1")
    fresh = release("0.20.0", requires_python=bound)
    assert fresh.refusal("3.12") is None
    assert latest([release("0.19.2"), fresh], "3.12") == fresh
    assert unknown_to([release("0.19.2"), fresh], ["0.19.2"], "3.12") == (fresh,)


def test_a_bound_above_the_interpreter_refuses(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.12.1")
    assert release("1.0", requires_python=">=3.12.2").refusal("3.12") == "needs Python >=3.12.2"
    assert release("1.0", requires_python=">=3.12.2").refusal("3.12.2") is None
    assert release("1.0", requires_python=">=3.13").refusal("3.12") is not None
    monkeypatch.setattr("platform.python_version", lambda: "3.13.0")  # uv then brings the newest 3.12
    assert release("1.0", requires_python=">=3.12.2").refusal("3.12") is None


def test_two_spellings_of_a_version_are_one_release():
    (merged,) = merge([release("0.20.0", yanked="bad")], [release("0.20")])
    assert (merged.version, merged.yanked) == ("0.20", None)


@pytest.mark.parametrize(
    "change", [("version", 1), ("version", "new"), ("wheels", "cp312"), ("source", {}), ("odd", 0)]
)
def test_a_damaged_list_is_refused_with_the_place(change, tmp_path):
    path = tmp_path / "releases.json"
    save_releases(path, [release("1.0")])
    raw = json.loads(path.read_text())
    raw["releases"][0] |= dict([change])
    path.write_text(json.dumps(raw))
    with pytest.raises(NoSuchReleaseError, match=r"releases\.json is not a list of releases: releases\.0"):
        load_releases(path)


def test_what_an_installer_would_take():
    listed = [release("0.16.1", requires_python=">=3.10"), release("0.19.2", requires_python=">=3.12"),
              release("0.19.3", yanked=""), release("0.20.0rc1"),
              release("0.18.0", requires_python="nonsense")]  # fmt: skip
    assert latest(listed, "3.12").version == "0.19.2"
    assert latest(listed, "3.11").version == "0.16.1"
    assert latest(listed, "3.12", candidates=True).version == "0.20.0rc1"
    assert [r.version for r in unknown_to(listed, ["0.16.1"], "3.12")] == ["0.19.2"]
    assert listed[2].refusal("3.12") == "yanked: no reason given"
    with pytest.raises(NoSuchReleaseError):
        latest(listed[2:3], "3.12")


def test_versions_are_found_in_any_spelling():
    assert find_release([release("0.18.0rc1")], "0.18.0-RC.1").version == "0.18.0rc1"
    for text in ("0.18.0", "eighteen"):
        with pytest.raises(NoSuchReleaseError):
            find_release([release("0.18.0rc1")], text)


def test_the_list_survives_the_file_and_what_the_index_drops_stays_explained(tmp_path):
    path = tmp_path / "deep" / "releases.json"
    save_releases(path, [release("1.0"), release("2.0", yanked="bad")])
    assert load_releases(path) == (release("1.0"), release("2.0", yanked="bad"))
    assert [r.yanked for r in merge(load_releases(path), [release("2.0")])] == ["no longer on the index", None]
    path.write_text('{"schema_version": 2}')
    with pytest.raises(NoSuchReleaseError, match=r"releases\.json"):
        load_releases(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "chmod", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_committed_list_works_offline_and_names_no_address(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    releases = load_releases(COMMITTED)
    assert latest(releases, "3.12").version == "0.19.2"
    assert find_release(releases, "0.18.1").yanked == "wrong version"
    assert "://" not in COMMITTED.read_text()
    with pytest.raises(IndexUnreachableError):
        fetch_releases()


def test_a_cached_file_is_used_only_while_its_hash_is_right(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    digest = hashlib.sha256(b"wheel").hexdigest()
    wanted = release("1.0")
    wanted = Release(**{**vars(wanted), "source": ReleaseFile("f.whl", digest, 5)})
    cached = tmp_path / "files" / digest / "f.whl"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"wheel")
    assert download(wanted, tmp_path) == cached
    cached.write_bytes(b"evil!")
    with pytest.raises(IndexUnreachableError):
        download(wanted, tmp_path)
