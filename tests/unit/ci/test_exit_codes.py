"""The exit code of the harness reaches whoever calls nox; nox itself makes 1 of every failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nox")

ROOT = Path(__file__).parents[3]
# The real sessions, in the environment that is there.
NOXFILE = """
import os
import nox
import nox.command
def install(*_arguments, **_options):
    if {fails}:
        raise nox.command.CommandFailed("no network", return_code=1)
nox.Session.install = install
os.chdir({root!r})
exec(compile(open("noxfile.py").read(), "noxfile.py", "exec"))
"""


def nox(tmp_path, session, *arguments, code=None, fails=False):
    """Call a session; with ``code`` the harness is replaced by a program that ends with it."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    command = f'exec {sys.executable} "$@"' if code is None else f"exit {code}" if code >= 0 else "kill -9 $$"
    for name in ("python", "python3"):
        (binaries / name).write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        (binaries / name).chmod(0o755)
    (tmp_path / "noxfile.py").write_text(NOXFILE.format(root=str(ROOT), fails=fails), encoding="utf-8")
    env = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    called = [sys.executable, "-m", "nox", "--no-venv", "-s", session, "--", *arguments]
    return subprocess.run(called, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)


CODES = [(0, 0), (1, 1), (2, 2), (3, 3), (130, 130), (77, 3), (-9, 3)]
CALLS = [*(("gate", *pair) for pair in CODES), *((name, 3, 3) for name in ("compat", "ecosystem", "gpu"))]


@pytest.mark.parametrize(("session", "code", "seen"), CALLS)
def test_the_code_of_the_command_is_the_code_of_nox(tmp_path, session, code, seen):
    done = nox(tmp_path, session, code=code)
    assert done.returncode == seen, done.stderr


def test_a_harness_that_cannot_be_installed_judged_nothing(tmp_path):
    assert nox(tmp_path, "gate", code=0, fails=True).returncode == 3


def test_a_wheel_that_is_not_there_is_a_wrong_call_through_nox_too(tmp_path):
    done = nox(tmp_path, "gate", "nowhere.whl", "--root", str(ROOT))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nowhere.whl" in done.stderr
