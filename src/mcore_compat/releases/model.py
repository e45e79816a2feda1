"""Discovery: which megatron-core releases exist, from the index or from the committed copy.

The committed ``compat_matrix/releases.json`` makes planning work offline; ``mcore-compat releases --update``
refreshes it. Only facts that planning needs are kept: no address of any index.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically
from mcore_compat.matrix.toml_file import DataModel

__all__ = [
    "PROJECT",
    "NoSuchReleaseError",
    "Release",
    "ReleaseFile",
    "find_release",
    "latest",
    "load_releases",
    "merge",
    "save_releases",
    "unknown_to",
]

PROJECT = "megatron-core"
SCHEMA_VERSION = 1
_NEWEST_PATCH = 99  # above every patch release of a minor version


class NoSuchReleaseError(UsageError):
    """No release of that version is known."""


@dataclass(frozen=True)
class ReleaseFile:
    """The file that the static lane reads: a wheel if there is one, else the sdist."""

    filename: str
    sha256: str
    size: int | None


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        version: as the index spells it.
        requires_python: specifier text, or None if none is declared.
        uploaded: date of the first file, ``YYYY-MM-DD``, or None.
        yanked: the reason, "" if none was given, None if a file of the release is not yanked.
        wheels: python tags for which an installer takes a Linux x86-64 wheel.
        sdist: whether an installer finds a source distribution.
        source: the file to read.
    """

    version: str
    requires_python: str | None
    uploaded: str | None
    yanked: str | None
    wheels: tuple[str, ...]
    sdist: bool
    source: ReleaseFile

    def __post_init__(self) -> None:
        Version(self.version)  # a list with another text in its place is refused when it is read

    @property
    def parsed(self) -> Version:
        """The version as an ordered value."""
        return Version(self.version)

    def allows(self, python: str) -> bool:
        """Whether ``requires-python`` admits an interpreter; no declaration admits all.

        Args:
            python: full version such as ``3.12.1``. A minor version stands for the interpreter that runs this if it
                is one of that minor version, else for its newest patch release. Upper bounds may also be met by the
                minor version itself (``<=3.12``), which uv, the installer of the cells, takes as the whole of 3.12.
        """
        if self.requires_python is None:
            return True
        try:
            bound = SpecifierSet(self.requires_python)
        except InvalidSpecifier:
            return False
        return any(bound.contains(version, prereleases=True) for version in {python, _full_version(python)})

    def refusal(self, python: str) -> str | None:
        """Why an installer would not choose this release on that interpreter, or None."""
        if self.yanked is not None:
            return f"yanked: {self.yanked or 'no reason given'}"
        if not self.allows(python):
            return f"needs Python {self.requires_python}"
        return None


def _full_version(python: str) -> str:
    """``3.12`` as ``3.12.1``; a full version as it is."""
    if python.count(".") > 1:
        return python
    here = platform.python_version()
    return here if here.startswith(f"{python}.") else f"{python}.{_NEWEST_PATCH}"


def save_releases(path: Path, releases: Iterable[Release]) -> None:
    """Write the list, oldest first, one release a line; atomic."""
    rows = ",\n".join(f"  {json.dumps(asdict(release), sort_keys=True)}" for release in releases)
    write_atomically(path, f'{{\n "schema_version": {SCHEMA_VERSION},\n "releases": [\n{rows}\n ]\n}}\n')


class _ReleaseList(DataModel):
    """``releases.json``."""

    schema_version: Literal[1]
    releases: tuple[Release, ...]


def load_releases(path: Path) -> tuple[Release, ...]:
    """Read the committed list.

    Raises:
        NoSuchReleaseError: the file is missing or not such a list.
    """
    try:
        return _ReleaseList.model_validate_json(path.read_bytes()).releases
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        problem = f"{path.name} is not a list of releases: {place}: {first['msg']}."
    except OSError as error:
        problem = f"{path.name} cannot be read ({error.strerror})."
    raise NoSuchReleaseError(problem, "Run `mcore-compat releases --update`.")


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


def merge(old: Iterable[Release], new: Iterable[Release]) -> tuple[Release, ...]:
    """New list with releases that the index dropped kept as yanked, so that old reports stay explainable.

    Spellings of one version (``0.20``, ``0.20.0``) are one release; the index's spelling wins.
    """
    table = {release.parsed: release for release in new}
    for release in old:
        if release.parsed not in table:
            table[release.parsed] = replace(release, yanked=release.yanked or "no longer on the index")
    return tuple(table[version] for version in sorted(table))
