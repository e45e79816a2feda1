"""Cells on top of an image: what they may get from it, and what the lane does to a matrix cell."""

import sys
import zipfile

import pytest

from mcore_compat.errors import InfrastructureError
from mcore_compat.matrix.cells import Cell
from mcore_compat.provision.host_image import Image, image_cell, link_farm, read_image
from mcore_compat.provision.wheelhouse import Wheel, Wheelhouse

ENTRY_POINTS = "[pytest11]\ntimeout = pytest_timeout\n[console_scripts]\nx = y:z\n"


def _site(folder, names=("torch", "triton", "numpy")):
    site = folder / "site-packages"
    for name in names:
        info = site / f"{name}-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("")
    return site


def _house(folder):
    path = folder / "pytest_timeout-2.4-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pytest_timeout.py", "")
        archive.writestr("pytest_timeout-2.4.dist-info/entry_points.txt", ENTRY_POINTS)
    return Wheelhouse(folder, "3.12", "x86_64", (), (Wheel.of(path, "index"),), {})


def _cell():
    return Cell(
        id="0.18.2",
        megatron_core="0.18.2",
        contract_class="0.18+",
        expected_mode="hook",
        python="3.12",
        torch="2.11.0",
        lane="cpu",
        time_limit_s=600,
        constraints=({"spec": "numpy<2.5", "reason": "the interpreter of Triton needs it"},),
    )


def test_an_image_with_its_own_megatron_lends_everything_else(tmp_path):
    site = _site(tmp_path, ("torch", "triton", "numpy", "megatron_core", "pytest_timeout", "einops"))
    for name in ("megatron", "sitecustomize.py", "editable.pth"):
        (site / name).mkdir() if name == "megatron" else (site / name).write_text("")
    farm = link_farm(read_image([site]), _house(tmp_path), tmp_path / "farm")
    linked = {entry.name for entry in farm.iterdir()}
    assert {"torch", "triton", "numpy", "einops", "torch-2.0.dist-info", "einops-2.0.dist-info"} <= linked
    assert not linked & {"megatron", "megatron_core-2.0.dist-info", "sitecustomize.py", "editable.pth"}
    assert "pytest_timeout-2.0.dist-info" not in linked
    assert all(entry.is_symlink() for entry in farm.iterdir())


@pytest.mark.parametrize("change", ["content", "gone", "new version"])
def test_an_image_that_changed_is_another_image(tmp_path, change):
    site = _site(tmp_path)
    before = read_image([site])
    assert read_image([site]).digest == before.digest
    if change == "content":
        (site / "triton" / "__init__.py").write_text("x = 1")
    elif change == "gone":
        (site / "numpy" / "__init__.py").unlink()
    else:
        (site / "torch-2.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.1\n")
    assert read_image([site]).digest != before.digest


@pytest.mark.parametrize("missing", ["torch", "triton", "numpy"])
def test_a_host_without_one_of_the_three_is_refused(tmp_path, missing):
    site = _site(tmp_path, tuple({"torch", "triton", "numpy"} - {missing}))
    with pytest.raises(InfrastructureError, match=f"no {missing}"):
        read_image([site])


def test_a_cell_takes_the_image_and_keeps_its_own(tmp_path):
    site = _site(tmp_path)
    image = Image((site,), {"torch": "2.9.1+cu130", "triton": "3.5", "numpy": "2.5"}, "digest", ("NVIDIA H200",))
    host = {"NCCL_NVLS_ENABLE": "0", "SECRET_TOKEN": "x", "PATH": "/bin"}
    cell = image_cell(_cell(), image, _house(tmp_path), host, {"MCORE_COMPAT_FAULT": "f"}, 90)
    assert (cell.id, cell.expected_mode, cell.lane, cell.torch) == ("0.18.2", "hook", "gpu", "2.9.1+cu130")
    assert cell.constraints == ()
    assert cell.time_limit_s == 90
    variables = {variable.name: variable.value for variable in cell.env}
    assert variables == {
        "NCCL_NVLS_ENABLE": "0",
        "MCORE_COMPAT_IMAGE": str(site),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout",
        "MCORE_COMPAT_FAULT": "f",
    }


def test_the_image_says_what_it_is(tmp_path):
    image = Image((), {"torch": "2.9"}, "", ("NVIDIA H200, driver 580",) * 2)
    assert str(image).startswith("2 x NVIDIA H200, driver 580; Python ")
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(image)
    assert str(Image((), {}, "", ())).startswith("no GPU")
