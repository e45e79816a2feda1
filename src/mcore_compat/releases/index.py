"""The package index: what there is, and verified downloads of it. All network access of the static lane is here."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs
import requests
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DigestMismatchError,
    DistributionPackage,
    NoSuchProjectError,
    ProjectPage,
    PyPISimple,
)

from mcore_compat.errors import InfrastructureError
from mcore_compat.releases.model import PROJECT, Release, ReleaseFile

__all__ = ["IndexUnreachableError", "cache_directory", "download", "fetch_releases", "release_of"]

# pip's, then uv's: who has a mirror for the cells has it for the contracts.
_INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")


class IndexUnreachableError(InfrastructureError):
    """The package index did not answer, or what came from it was not what it had promised."""


def release_of(version: str, packages: Sequence[DistributionPackage]) -> Release | None:
    """One release from the index's files of one version; None where no file carries a SHA-256."""
    readable = [p for p in packages if p.digests.get("sha256") and p.package_type in {"wheel", "sdist"}]
    if not readable:
        return None

    def preference(package: DistributionPackage) -> tuple[bool, bool, bool, str]:
        name = package.filename
        return (not name.endswith(".whl"), "cp312" not in name, "x86_64" not in name, name)

    best = min(readable, key=preference)
    names = [package.filename for package in packages]
    tags = {name.split("-")[2] for name in names if name.endswith(".whl") and ("x86_64" in name or "none-any" in name)}
    times = [package.upload_time.date().isoformat() for package in packages if package.upload_time]
    reasons = [package.yanked_reason or "" for package in packages if package.is_yanked]
    return Release(
        version=version,
        requires_python=best.requires_python,
        uploaded=min(times, default=None),
        yanked=reasons[0] if len(reasons) == len(packages) else None,
        wheels=tuple(sorted(tags)),
        sdist=any(name.endswith(".tar.gz") for name in names),
        source=ReleaseFile(best.filename, best.digests["sha256"], best.size),
    )


def fetch_releases(endpoint: str | None = None) -> tuple[Release, ...]:
    """Ask the index (PEP 691) for all final and candidate releases, oldest first; nightly ``.dev`` builds are left out.

    Args:
        endpoint: simple-API address; where None that of pip's or uv's variable, else the public index.

    Raises:
        IndexUnreachableError: no answer, or not an index's answer.
    """
    by_version: dict[str, list[DistributionPackage]] = {}
    for package in _page(endpoint).packages:
        by_version.setdefault(package.version or "", []).append(package)
    found = [release_of(version, packages) for version, packages in by_version.items() if _is_release(version)]
    return tuple(sorted((release for release in found if release), key=lambda release: release.parsed))


def _is_release(version: str) -> bool:
    try:
        return not Version(version).is_devrelease
    except InvalidVersion:
        return False


def _page(endpoint: str | None) -> ProjectPage:
    named = (os.environ.get(name) for name in _INDEX_VARIABLES)
    address = endpoint or next(filter(None, named), PYPI_SIMPLE_ENDPOINT)
    try:
        with PyPISimple(address) as client:
            return client.get_project_page(PROJECT, timeout=60)
    except (requests.RequestException, NoSuchProjectError, ValueError) as error:
        raise IndexUnreachableError(
            f"the package index gave no list of {PROJECT} ({type(error).__name__}).",
            "work from the committed list (leave --update out), or set PIP_INDEX_URL to an index that you can reach.",
        ) from error


def cache_directory() -> Path:
    """Where downloads are kept: ``MCORE_COMPAT_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("MCORE_COMPAT_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("mcore-compat"))


def download(release: Release, cache: Path | None = None, endpoint: str | None = None) -> Path:
    """The release's source file, from the cache or the index; its SHA-256 is checked both ways.

    Raises:
        IndexUnreachableError: it cannot be fetched, or its hash is not the recorded one.
    """
    wanted = release.source
    target = (cache or cache_directory()) / "files" / wanted.sha256 / wanted.filename
    if target.is_file() and _sha256(target) == wanted.sha256:
        return target
    package = next((p for p in _page(endpoint).packages if p.filename == wanted.filename), None)
    if package is None:
        raise IndexUnreachableError(
            f"the index does not have {wanted.filename}.", "run `mcore-compat releases --update`."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
    os.close(handle)
    temporary = Path(name)
    try:
        with PyPISimple() as client:
            client.download_package(package, temporary, verify=True, timeout=300)
        if _sha256(temporary) != wanted.sha256:
            raise IndexUnreachableError(
                f"{wanted.filename} from the index is not the file recorded in releases.json.",
                "do not install it; compare with another index, then `mcore-compat releases --update`.",
            )
        temporary.replace(target)
    except (requests.RequestException, DigestMismatchError) as error:
        raise IndexUnreachableError(
            f"{wanted.filename} could not be downloaded ({type(error).__name__}).", "try again, or give a local file."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
