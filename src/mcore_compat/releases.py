"""Discovery: which megatron-core releases exist, from the index or from the committed copy.

The committed ``compat_matrix/releases.json`` makes planning work offline; ``mcore-compat releases --update``
refreshes it. Only facts that planning needs are kept: no address of any index.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from mcore_compat.errors import McoreCompatError

__all__ = [
    "PROJECT",
    "IndexUnreachableError",
    "NoSuchReleaseError",
    "Release",
    "ReleaseFile",
    "cache_directory",
    "download",
    "fetch_releases",
    "find_release",
    "latest",
    "load_releases",
    "save_releases",
    "unknown_to",
]

PROJECT = "megatron-core"
SCHEMA_VERSION = 1


class IndexUnreachableError(McoreCompatError):
    """The package index did not answer, or what came from it was not what it had promised."""


class NoSuchReleaseError(McoreCompatError):
    """No release of that version is known."""


@dataclass(frozen=True)
class ReleaseFile:
    """The file that the static lane reads: a wheel where there is one, else the sdist."""

    filename: str
    sha256: str
    size: int | None


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        version: as the index spells it.
        requires_python: specifier text, or None where none is declared.
        uploaded: date of the first file, ``YYYY-MM-DD``, or None.
        yanked: the reason, "" where none was given, None where the release is not yanked.
        wheels: python tags for which there are Linux x86-64 wheels.
        sdist: whether there is a source distribution.
        source: the file to read.
    """

    version: str
    requires_python: str | None
    uploaded: str | None
    yanked: str | None
    wheels: tuple[str, ...]
    sdist: bool
    source: ReleaseFile

    @property
    def parsed(self) -> Version:
        """The version as an ordered value."""
        return Version(self.version)

    def allows(self, python: str) -> bool:
        """Whether ``requires-python`` admits an interpreter version such as ``3.12`` (no declaration admits all)."""
        if self.requires_python is None:
            return True
        try:
            return SpecifierSet(self.requires_python).contains(python, prereleases=True)
        except InvalidSpecifier:
            return False

    def refusal(self, python: str) -> str | None:
        """Why an installer would not choose this release on that interpreter, or None."""
        if self.yanked is not None:
            return f"yanked: {self.yanked or 'no reason given'}"
        if not self.allows(python):
            return f"needs Python {self.requires_python}"
        return None


def _files(packages: Sequence[object]) -> Release | None:
    """One release from the index's files of one version (``pypi_simple.DistributionPackage``)."""
    entries: list[dict[str, object]] = [vars(package) for package in packages]
    sha = [(entry, (entry["digests"] or {}).get("sha256")) for entry in entries]  # type: ignore[attr-defined]
    readable = [(e, s) for e, s in sha if s and e["package_type"] in {"wheel", "sdist"}]
    if not readable:
        return None

    def preference(pair: tuple[dict[str, object], str]) -> tuple[bool, bool, str]:
        name = str(pair[0]["filename"])
        return (not name.endswith(".whl"), "cp312" not in name or "x86_64" not in name, name)

    best, digest = min(readable, key=preference)
    names = [str(entry["filename"]) for entry in entries]
    tags = {name.split("-")[2] for name in names if name.endswith(".whl") and ("x86_64" in name or "none-any" in name)}
    times = [str(entry["upload_time"])[:10] for entry in entries if entry["upload_time"]]
    all_yanked = all(entry["is_yanked"] for entry in entries)
    reason = next((str(entry["yanked_reason"] or "") for entry in entries if entry["is_yanked"]), "")
    size = best["size"]
    return Release(
        version=str(best["version"]),
        requires_python=str(best["requires_python"]) if best["requires_python"] else None,
        uploaded=min(times) if times else None,
        yanked=reason if all_yanked else None,
        wheels=tuple(sorted(tags)),
        sdist=any(name.endswith(".tar.gz") for name in names),
        source=ReleaseFile(str(best["filename"]), digest, size if isinstance(size, int) else None),
    )


def fetch_releases(endpoint: str | None = None) -> tuple[Release, ...]:
    """Ask the index (PEP 691) for all final and candidate releases, oldest first; nightly ``.dev`` builds are left out.

    Args:
        endpoint: simple-API address; the environment's ``PIP_INDEX_URL``, else the public index, where None.

    Raises:
        IndexUnreachableError: no answer, or not an index's answer.
    """
    by_version: dict[str, list[object]] = {}
    for package in _page(endpoint).packages:
        by_version.setdefault(package.version or "", []).append(package)
    found = [release for version, packages in by_version.items() if _is_release(version) and (release := _files(packages))]
    return tuple(sorted(found, key=lambda release: release.parsed))


def _is_release(version: str) -> bool:
    try:
        return not Version(version).is_devrelease
    except InvalidVersion:
        return False


def _page(endpoint: str | None) -> "pypi_simple.ProjectPage":
    import pypi_simple
    import requests

    address = endpoint or os.environ.get("PIP_INDEX_URL") or pypi_simple.PYPI_SIMPLE_ENDPOINT
    try:
        with pypi_simple.PyPISimple(address) as client:
            return client.get_project_page(PROJECT, timeout=60)
    except (requests.RequestException, pypi_simple.NoSuchProjectError, ValueError) as error:
        raise IndexUnreachableError(
            f"the package index gave no list of {PROJECT} ({type(error).__name__}).",
            "work from the committed list (leave --update out), or set PIP_INDEX_URL to an index that you can reach.",
        ) from error


def save_releases(path: Path, releases: Iterable[Release]) -> None:
    """Write the list, oldest first, one release a line; atomic."""
    rows = ",\n".join(f"  {json.dumps(asdict(release), sort_keys=True)}" for release in releases)
    write_atomically(path, f'{{\n "schema_version": {SCHEMA_VERSION},\n "releases": [\n{rows}\n ]\n}}\n')


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_releases(path: Path) -> tuple[Release, ...]:
    """Read the committed list.

    Raises:
        NoSuchReleaseError: the file is missing or not such a list.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {raw['schema_version']}")
        return tuple(
            Release(**{**row, "wheels": tuple(row["wheels"]), "source": ReleaseFile(**row["source"])})
            for row in raw["releases"]
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise NoSuchReleaseError(
            f"{path.name} is not a list of releases ({error}).", "run `mcore-compat releases --update`."
        ) from error


def find_release(releases: Iterable[Release], version: str) -> Release:
    """The release of a version; spellings that mean the same version are equal.

    Raises:
        NoSuchReleaseError: not in the list, or not a version.
    """
    try:
        wanted = Version(version)
    except InvalidVersion as error:
        raise NoSuchReleaseError(f"{version!r} is not a version.", "give one such as 0.18.2.") from error
    for release in releases:
        if release.parsed == wanted:
            return release
    raise NoSuchReleaseError(
        f"{PROJECT} {version} is not among the known releases.",
        "run `mcore-compat releases --update`; an unreleased candidate is given as a wheel, a folder or a git ref.",
    )


def latest(releases: Iterable[Release], python: str, *, candidates: bool = False) -> Release:
    """Newest release an installer would choose.

    Raises:
        NoSuchReleaseError: none is left.
    """
    fit = [r for r in releases if r.refusal(python) is None and (candidates or not r.parsed.is_prerelease)]
    if not fit:
        raise NoSuchReleaseError(f"no release fits Python {python}.", "use Python 3.12, or update the list.")
    return max(fit, key=lambda release: release.parsed)


def unknown_to(releases: Iterable[Release], known: Iterable[str], python: str) -> tuple[Release, ...]:
    """Final releases that an installer would choose, newer than the oldest known one, and not known."""
    versions = {Version(version) for version in known}
    floor = min(versions, default=Version("0"))
    return tuple(
        release
        for release in releases
        if release.parsed not in versions
        and release.parsed > floor
        and not release.parsed.is_prerelease
        and release.refusal(python) is None
    )


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
        raise IndexUnreachableError(f"the index does not have {wanted.filename}.", "run `mcore-compat releases --update`.")
    import pypi_simple
    import requests

    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
    os.close(handle)
    temporary = Path(name)
    try:
        with pypi_simple.PyPISimple() as client:
            client.download_package(package, temporary, verify=True, timeout=300)
        if _sha256(temporary) != wanted.sha256:
            raise IndexUnreachableError(
                f"{wanted.filename} from the index is not the file recorded in releases.json.",
                "do not install it; compare with another index, then `mcore-compat releases --update`.",
            )
        temporary.replace(target)
    except (requests.RequestException, pypi_simple.DigestMismatchError) as error:
        raise IndexUnreachableError(
            f"{wanted.filename} could not be downloaded ({type(error).__name__}).", "try again, or give a local file."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def merge(old: Iterable[Release], new: Iterable[Release]) -> tuple[Release, ...]:
    """New list with releases that the index dropped kept as yanked, so that old reports stay explainable."""
    table = {release.version: release for release in new}
    for release in old:
        if release.version not in table:
            table[release.version] = replace(release, yanked=release.yanked or "no longer on the index")
    return tuple(sorted(table.values(), key=lambda release: release.parsed))
