"""The package index: what there is, and verified downloads of it. All network access of the static lane is here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs
import requests
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DigestMismatchError,
    DistributionPackage,
    NoSuchProjectError,
    ProjectPage,
    PyPISimple,
)

from mcore_compat import versions
from mcore_compat.errors import InfrastructureError
from mcore_compat.files.digest import digest_of_file
from mcore_compat.releases.model import PROJECT, Release, ReleaseFile

__all__ = ["IndexUnreachableError", "cache_directory", "download", "fetch_releases", "release_of"]

# pip's, then uv's: who has a mirror for the cells has it for the contracts.
_INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")


class IndexUnreachableError(InfrastructureError):
    """The package index did not answer, or what came from it was not what it had promised."""


def release_of(version: str, packages: Sequence[DistributionPackage]) -> Release | None:
    """One release from the index's files of one version; None where no file carries a SHA-256.

    Yanking is a property of files: while one file is not yanked, the yanked ones do not exist for an installer.
    """
    live = [package for package in packages if not package.is_yanked]
    offered = live or list(packages)
    readable = [p for p in offered if p.digests.get("sha256") and p.package_type in {"wheel", "sdist"}]
    if not readable:
        return None
    best = min(readable, key=_preference)
    tags = {
        tag.interpreter
        for package in offered
        for tag in _wheel_tags(package.filename)
        if tag.platform == "any" or tag.platform.endswith("x86_64")
    }
    times = [package.upload_time.date().isoformat() for package in packages if package.upload_time]
    reasons = [package.yanked_reason for package in packages if package.yanked_reason]
    return Release(
        version=version,
        requires_python=best.requires_python,
        uploaded=min(times, default=None),
        yanked=None if live else next(iter(reasons), ""),
        wheels=tuple(sorted(tags)),
        sdist=any(package.filename.endswith(".tar.gz") for package in offered),
        source=ReleaseFile(best.filename, best.digests["sha256"], best.size),
    )


def _preference(package: DistributionPackage) -> tuple[bool, bool, bool, int, str]:
    """Sort key: the file that an installer on this project's interpreter and host takes comes first."""
    tags = _wheel_tags(package.filename)
    return (
        not tags,
        not any(tag.interpreter == "cp312" for tag in tags),
        not any(tag.platform.endswith("x86_64") for tag in tags),
        -_build_number(package.filename),
        package.filename,
    )


def _wheel_tags(filename: str) -> frozenset[Tag]:
    """Tags of a wheel; none for other files, and for a wheel that no installer takes because of its name."""
    try:
        return parse_wheel_filename(filename)[3]
    except InvalidWheelFilename:
        return frozenset()


def _build_number(filename: str) -> int:
    """Number of a wheel's build tag; of two wheels that differ in it only, installers take the higher one."""
    try:
        build = parse_wheel_filename(filename)[2]
    except InvalidWheelFilename:
        return 0
    return build[0] if build else 0


def fetch_releases(endpoint: str | None = None) -> tuple[Release, ...]:
    """Ask the index (PEP 691) for all final and candidate releases, oldest first; nightly ``.dev`` builds are left out.

    Args:
        endpoint: simple-API address; where None that of pip's or uv's variable, else the public index.

    Raises:
        IndexUnreachableError: no answer, or not an index's answer.
    """
    by_version: dict[Version, list[DistributionPackage]] = {}
    for package in _page(endpoint).packages:
        version = versions.parse(package.version or "")
        if version is not None and not version.is_devrelease:
            by_version.setdefault(version, []).append(package)
    found = [release_of(packages[0].version or "", packages) for _, packages in sorted(by_version.items())]
    return tuple(release for release in found if release)


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
    if target.is_file() and digest_of_file(target) == wanted.sha256:
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
        if digest_of_file(temporary) != wanted.sha256:
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
