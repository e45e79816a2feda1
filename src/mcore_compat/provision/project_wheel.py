"""The wheel of a project, built from its root once per run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mcore_compat.errors import InfrastructureError
from mcore_compat.files.digest import digest_of_file
from mcore_compat.provision.uv import Uv, UvFailure
from mcore_compat.records import ProjectWheel

__all__ = ["build_offline", "build_wheel", "described"]

_BUILD_LIMIT_S = 300
# Equal sources give an equal wheel.
_EPOCH = "1577836800"


def build_wheel(root: Path, store: Path, uv: Uv, whose: str = "This project's own wheel") -> ProjectWheel:
    """Build the wheel of the project at ``root`` into ``store``, under its own hash.

    Args:
        root: the project's root.
        store: where the wheel goes.
        uv: the installer.
        whose: names it in an error.

    Raises:
        InfrastructureError: it does not build.
    """
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store, prefix="build-") as folder:
        try:
            # With this interpreter: none is looked for in another project's folder, nor downloaded.
            uv.call(["build", "-q", "--wheel", "-p", sys.executable, "--out-dir", folder, root])
        except UvFailure as exc:
            remedy = "Check the network, or run once with it." if exc.host_at_fault else "Correct pyproject.toml."
            raise InfrastructureError(f"{whose} does not build: {exc.reason}.", remedy) from exc
        built = next(Path(folder).glob("*.whl"))
        home = store / digest_of_file(built)[:16]
        home.mkdir(exist_ok=True)
        wheel = home / built.name
        if not wheel.is_file():
            shutil.move(built, wheel)
    return described(wheel, _commit(root))


def build_offline(root: Path, store: Path, commit: str | None = None) -> ProjectWheel:
    """Build the wheel with the hatchling of this interpreter, in a process that only sees the harness's own path.

    Args:
        root: the project's root.
        store: where the wheel goes; other wheels there are removed.
        commit: of the checkout, where git cannot tell.

    Raises:
        InfrastructureError: it does not build.
    """
    store.mkdir(parents=True, exist_ok=True)
    for old in store.glob("*.whl"):
        old.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", store],
        cwd=root,
        env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH},
        capture_output=True,
        text=True,
        check=False,
        timeout=_BUILD_LIMIT_S,
    )
    built = sorted(store.glob("*.whl"))
    if done.returncode != 0 or len(built) != 1:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InfrastructureError(f"This project's own wheel does not build: {last}.", "Correct pyproject.toml.")
    return described(built[0], commit or _commit(root))


def described(wheel: Path, commit: str | None) -> ProjectWheel:
    """A wheel by its file name and content.

    Args:
        wheel: the file.
        commit: of the checkout it was built from.
    """
    name, version = wheel.name.split("-")[:2]
    return ProjectWheel(
        name=name.replace("_", "-"), version=version, sha256=digest_of_file(wheel), commit=commit, wheel=wheel
    )


def _commit(root: Path) -> str | None:
    """The checkout's commit, with ``+dirty`` if tracked files differ; None outside of git."""
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
