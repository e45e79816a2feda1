"""The built wheel alone, in an empty folder: what reads sources needs no checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FROM_THE_WHEEL = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import mcore_compat
assert mcore_compat.__file__.startswith(sys.path[0]), mcore_compat.__file__
from mcore_compat.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The wheel, built as a release is and unpacked, so that nothing of the checkout is on the path before it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "uv", "build", "-q", "--wheel", "--out-dir", folder, ROOT]
    subprocess.run(command, check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def call(site, folder, *arguments):
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", FROM_THE_WHEEL, site, *arguments], cwd=folder, capture_output=True, text=True,
        check=False, timeout=240, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("releases", "--latest"), 0, "0."),
        (("contract", "diff", "0.17.1", "0.18.0"), 0, "0.18.0"),
        (("contract", "check", "0.18.2", "--baseline", "0.18.0"), 0, "0.18.2"),
        (("contract", "classes"), 0, "0.19.2"),
        (("bisect", "--good", "0.17.1", "--bad", "0.18.2", "--item", "gpt.hook"), 0, "0.18.0"),
        (("gate", "0.18.2", "--baseline", "0.18.0", "--static"), 3, "report: reports/"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_what_reads_sources_works_in_an_empty_folder(site, tmp_path, arguments, code, words):
    done = call(site, tmp_path / "empty", *arguments)
    assert (done.returncode, words in done.stdout) == (code, True), done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("run",), ("plan",), ("contract", "snapshot"), ("releases", "--update")])
def test_what_writes_or_runs_says_that_it_needs_a_project(site, tmp_path, arguments):
    done = call(site, tmp_path / "empty", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("error: No compat_matrix/matrix.toml was found here.")


def test_the_suite_of_the_fused_forward_is_in_the_wheel(site):
    suite = site / "mcore_compat" / "suites" / "fused_forward"
    assert (suite / "conftest.py").is_file()
    assert (suite / "support" / "subjects" / "own.py").is_file()


def test_another_project_is_planned_without_a_checkout(site, tmp_path):
    """Its settings are read, its releases are found, and no file of this project is asked for."""
    folder = tmp_path / "acme"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "acme"\nversion = "1"\n[tool.mcore-compat]\nmatrix = { releases = ["0.17.1", "0.18.2"] }\n',
        encoding="utf-8",
    )
    done = call(site, folder, "plan")
    assert (done.returncode, [line.split()[0] for line in done.stdout.splitlines()]) == (0, ["0.17.1", "0.18.2"])


def test_the_example_goes_from_zero_to_a_finding(site, tmp_path):
    """``init`` twice, ``plan``, and ``check`` against a release that breaks it; what runs cells is not tried here."""
    shutil.copytree(ROOT / "examples" / "downstream", tmp_path / "acme-rl")
    first, second = (call(site, tmp_path / "acme-rl", "init") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "0.17.1, 0.18.2, 0.19.2" in first.stdout
    assert "written" not in second.stdout
    plan = call(site, tmp_path / "acme-rl", "plan")
    assert [line.split()[0] for line in plan.stdout.splitlines()] == ["0.17.1", "0.18.2", "0.19.2"], plan.stderr
    check = call(site, tmp_path / "acme-rl", "check", ".", "--against", "0.18.2,0.19.2", "--pin", "0.18.2")
    assert check.returncode == 1, check.stdout + check.stderr
    assert "0.18.2 (reference): fine" in check.stdout
    assert "src/acme_rl/metrics.py:21: silent" in check.stdout
