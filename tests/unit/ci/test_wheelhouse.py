"""The offline bundle: what is damaged, missing or foreign is refused, and nothing leaves its folder."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.provision.wheelhouse import Wheel, Wheelhouse, WheelhouseError, distribution_name, unpack


def _wheel(folder, name="thing-1.0-py3-none-any.whl", members=None):
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in (members or {"thing/__init__.py": "x = 1\n"}).items():
            archive.writestr(member, text)
    return path


def _house(folder):
    wheel = Wheel.of(_wheel(folder), "index")
    return Wheelhouse(folder, "3.12", "x86_64", (wheel,), (wheel,), {"megatron-core==1": (wheel,)})


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    house = _house(tmp_path)
    house.write()
    assert Wheelhouse.read(tmp_path) == house
    assert house.size == (tmp_path / house.wheels[0].filename).stat().st_size
    assert len(house.wheels) == 1


@given(position=st.integers(0, 200), flip=st.integers(1, 255))
def test_every_changed_byte_is_noticed(tmp_path_factory, position, flip):
    folder = tmp_path_factory.mktemp("bundle")
    house = _house(folder)
    path = folder / house.wheels[0].filename
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= flip
    path.write_bytes(data)
    with pytest.raises(WheelhouseError, match="not the file"):
        house.unpack(house.suite, folder / "site")
    assert not any((folder / "site").rglob("*.py"))


def test_a_missing_wheel_is_named(tmp_path):
    house = _house(tmp_path)
    (tmp_path / house.wheels[0].filename).unlink()
    with pytest.raises(WheelhouseError, match=r"thing-1\.0-py3-none-any\.whl is missing"):
        house.unpack(house.suite, tmp_path / "site")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"python": "3.12", "machine": "x", "harness": 3}'])
def test_a_broken_manifest_is_no_bundle(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(WheelhouseError, match="cannot be read"):
        Wheelhouse.read(tmp_path)
    with pytest.raises(WheelhouseError, match="There is no bundle"):
        Wheelhouse.read(tmp_path / "nowhere")


def test_another_processor_or_interpreter_is_refused(tmp_path):
    house = _house(tmp_path)
    house.check_host("x86_64")
    with pytest.raises(WheelhouseError, match="aarch64"):
        house.check_host("aarch64")
    other = Wheelhouse(tmp_path, "3.9", "x86_64", (), (), {})
    with pytest.raises(WheelhouseError, match=r"for Python 3\.9"):
        other.check_host("x86_64")


@pytest.mark.parametrize("member", ["../evil.py", "a/../../evil.py", "/tmp/evil.py"])
def test_a_member_outside_of_the_wheel_is_refused(tmp_path, member):
    path = _wheel(tmp_path, members={member: "boom"})
    with pytest.raises(WheelhouseError, match="outside"):
        unpack(path, tmp_path / "site")
    assert not list(tmp_path.glob("**/evil.py"))


def test_data_folders_are_unfolded_and_scripts_left_out(tmp_path):
    members = {
        "thing-1.0.data/purelib/thing/a.py": "a",
        "thing-1.0.data/scripts/thing": "s",
        "thing-1.0.dist-info/METADATA": "Name: thing",
    }
    unpack(_wheel(tmp_path, members=members), tmp_path / "site")
    found = sorted(path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.*"))
    assert "thing/a.py" in found
    assert not (tmp_path / "site" / "thing-1.0.data").exists()
    assert not (tmp_path / "site" / "thing").is_file()


def test_names_are_normalised_and_hashes_are_of_the_file(tmp_path):
    path = _wheel(tmp_path)
    assert Wheel.of(path, "built").sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert distribution_name("Megatron_Core-0.18.2-cp312.whl") == "megatron-core"
    assert distribution_name(Path("pytest-9.1.0.dist-info").name) == "pytest"
