"""A copy of a run's sources, named by its content: what is edited during a run does not reach the run."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from mcore_compat.files.digest import CACHES, digest_of_tree

__all__ = ["is_sealed", "sealed_copy"]

_KEPT_S = 14 * 24 * 3600.0


def sealed_copy(base: Path, entries: Iterable[Path], store: Path) -> tuple[Path, str]:
    """Copy files and folders below ``store``; their places relative to ``base`` stay as they are.

    Args:
        base: a folder that holds all of them.
        entries: files and folders; caches in them are left out.
        store: where the copies of all runs are.

    Returns:
        The folder that stands for ``base``, and the digest of everything in it: of the copy, not of the original.

    Raises:
        OSError: something cannot be read or written.
    """
    store.mkdir(parents=True, exist_ok=True)
    fresh = store / f".{secrets.token_hex(8)}"
    fresh.mkdir()
    try:
        for entry in entries:
            target = fresh / entry.relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.is_dir():
                ignored = shutil.ignore_patterns(*CACHES, "*.pyc")
                shutil.copytree(entry, target, ignore=ignored, dirs_exist_ok=True, symlinks=False)
            else:
                shutil.copyfile(entry, target)
        for path in fresh.rglob("*"):
            if path.is_file():
                path.chmod(0o444)
        digest = digest_of_tree([fresh])
        sealed = store / digest[:32]
        with FileLock(store / ".lock"):  # another run may be putting the same copy in place, and use it at once
            if not is_sealed(sealed, digest):
                shutil.rmtree(sealed, ignore_errors=True)
                fresh.rename(sealed)
            os.utime(sealed)
            _prune(store)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return sealed, digest


def is_sealed(folder: Path, digest: str) -> bool:
    """Whether a copy is still as it was made."""
    return folder.is_dir() and digest_of_tree([folder]) == digest


def _prune(store: Path) -> None:
    """Remove copies that no run has used for two weeks."""
    for path in store.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the unfinished copy of another run
            if path.is_dir() and time.time() - path.stat().st_mtime > _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
