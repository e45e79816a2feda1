"""The implementation under test: this project's own wheel, built once a run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from mcore_compat.errors import InfrastructureError
from mcore_compat.provision.uv import Uv, UvFailure
from mcore_compat.records import ProjectWheel

__all__ = ["ProjectWheel", "build_subject"]


def build_subject(root: Path, store: Path, uv: Uv) -> ProjectWheel:
    """Build the wheel of the project at ``root`` into ``store``, under its own hash.

    Raises:
        InfrastructureError: it does not build.
    """
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store, prefix="build-") as folder:
        try:
            uv.call(["build", "-q", "--wheel", "--out-dir", folder, root])
        except UvFailure as exc:
            remedy = "Check the network, or run once with it." if exc.host_at_fault else "Correct pyproject.toml."
            raise InfrastructureError(f"This project's own wheel does not build: {exc.reason}.", remedy) from exc
        built = next(Path(folder).glob("*.whl"))
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        home = store / digest[:16]
        home.mkdir(exist_ok=True)
        wheel = home / built.name
        if not wheel.is_file():
            shutil.move(built, wheel)
    name, version = wheel.name.split("-")[:2]
    return ProjectWheel(name=name.replace("_", "-"), version=version, sha256=digest, commit=_commit(root), wheel=wheel)


def _commit(root: Path) -> str | None:
    try:
        head = _git(root, "rev-parse", "HEAD").strip()
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head[:12]}+dirty" if dirty else head[:12]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", root, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout
