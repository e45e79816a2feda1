"""The front door: every cell has a session of its own, and the default session runs them all."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def _nox(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "nox", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def test_every_cell_is_a_session_and_the_default_runs_them_all():
    listed = _nox("-l").stdout
    cells = tomllib.loads((ROOT / "compat_matrix" / "matrix.toml").read_text())["cell"]
    assert all(f"- compat({cell['id']})" in listed for cell in cells)
    assert [line for line in listed.splitlines() if line.startswith("* ")] == [
        "* compat -> Judge every megatron-core of the matrix (the main job)."
    ]
