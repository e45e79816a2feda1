"""Shared by the harness's tests: a project to run."""

import harness_builders as build
import pytest
from harness_project import REAL


@pytest.fixture
def project(tmp_path):
    """The root of a project with the real matrix and a suite of two checks."""
    root = tmp_path / "project"
    data = root / "compat_matrix"
    data.mkdir(parents=True)
    text = (REAL / "matrix.toml").read_text(encoding="utf-8")
    (data / "matrix.toml").write_text(text, encoding="utf-8")
    (data / "expectations.toml").write_text("schema_version = 1\n", encoding="utf-8")
    entries = "".join(f'[[check]]\nid = "{check}"\n' for check in build.CHECKS)
    (data / "inventory.toml").write_text(f"schema_version = 1\n{entries}", encoding="utf-8")
    (root / "suite").mkdir()
    (root / "suite" / "test_a.py").write_text("", encoding="utf-8")
    return root
