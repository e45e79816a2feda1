"""Shared by the harness's tests: a project to run."""

from pathlib import Path

import harness_builders as build
import pytest
from harness_project import REAL, FakeUv, passing_suite

from mcore_compat.pipeline import session
from mcore_compat.records import ProjectWheel


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of three cells whose environments are made in no time and whose suites pass."""
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
    monkeypatch.setattr(session, "Uv", FakeUv)
    monkeypatch.setattr(
        session, "build_subject", lambda *_: ProjectWheel("mcore-compat", "0.1.0", "ab" * 32, None, Path("x.whl"))
    )
    monkeypatch.setattr(
        session, "provision", lambda cell, *_: build.provisioned(folder=root / cell.id, version=cell.megatron_core)
    )
    monkeypatch.setattr(session, "run_suite", passing_suite)
    return root
