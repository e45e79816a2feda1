"""The names of a megatron-core: one grammar for the matrix, the gate and all other commands.

A release is named by its version; anything else by a wheel, an sdist, a folder or a ``git+…`` URL, with or without
``megatron-core @`` before it. An installer wants what it has to build named, since only what is named may be built, and
a wheel as a path: :attr:`Source.requirement` is that form. Nothing is opened here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from mcore_compat import versions

__all__ = ["Source", "SourceKind", "SourceNameError", "installable_source", "local_path", "parse_source"]

_NAME = "megatron-core"
_FORMS = "give a .whl, a .tar.gz, a folder, git+file:///repository@ref or git+https://host/repository@ref"
_GIT = ("git+file", "git+https", "git+ssh")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_NAMED = re.compile(r"([A-Za-z0-9._-]+)\s*@\s*(\S.*)")


class SourceNameError(ValueError):
    """A text that names no megatron-core; its message is ``problem | next step``."""

    def __init__(self, problem: str, next_step: str = _FORMS) -> None:
        self.problem = problem
        self.next_step = next_step
        super().__init__(f"{problem} | {next_step}")


class SourceKind(StrEnum):
    """The forms."""

    RELEASE = "release"
    PATH = "path"
    GIT = "git"
    ARCHIVE = "archive"


@dataclass(frozen=True)
class Source:
    """A named megatron-core.

    Attributes:
        kind: the form it was named in.
        version: of a release.
        path: absolute, of a file, a folder, or a repository on this host.
        address: as an installer takes it, of a repository (``git+…``) or of an archive on another host.
        repository: address or path of a repository, for git itself.
        ref: of a repository, None if none was given.
    """

    kind: SourceKind
    version: str | None = None
    path: Path | None = None
    address: str | None = None
    repository: str | None = None
    ref: str | None = None

    @property
    def requirement(self) -> str:
        """What the installer is asked for."""
        if self.kind is SourceKind.RELEASE:
            return f"{_NAME}=={self.version}"
        if self.address is not None:
            return f"{_NAME} @ {self.address}"
        assert self.path is not None
        return str(self.path) if self.path.suffix == ".whl" else f"{_NAME} @ {self.path.as_uri()}"


def parse_source(text: str, folder: Path) -> Source:
    """Read a name; it is not looked at whether anything is there.

    Args:
        text: as written.
        folder: where a relative path starts.

    Raises:
        SourceNameError: it names none of these, or another project.
    """
    if not text.isprintable() or not text.strip():
        raise SourceNameError(f"{text!r} is not a source")
    address = _address(text.strip())
    version = _pinned(address)
    if version is not None:
        return Source(SourceKind.RELEASE, version=version)
    parts = _split(address)
    if parts.scheme in _GIT:
        return _repository(text, address, parts)
    if parts.scheme == "https":
        name = Path(unquote(parts.path)).name
        if not name.endswith(_ARCHIVES):
            raise SourceNameError(f"`{text}` is not a wheel or an sdist")
        _own_wheel(name, text)
        return Source(SourceKind.ARCHIVE, address=address)
    if parts.scheme not in {"", "file"}:
        raise SourceNameError(f"`{parts.scheme}://` is not a place to install from")
    path = (folder / _expanded(unquote(parts.path) if parts.scheme else address)).resolve()
    _own_wheel(path.name, text)
    return Source(SourceKind.PATH, path=path)


def installable_source(text: str, folder: Path) -> str:
    """What the installer is asked for in place of a release on the index.

    Args:
        text: as written; ``megatron-core @ ADDRESS`` and ``ADDRESS`` are the same.
        folder: where a relative path starts.

    Returns:
        An absolute path of a wheel, or ``megatron-core @ ADDRESS`` with an absolute address.

    Raises:
        SourceNameError: it names no source, a release, or another project.
    """
    source = parse_source(text, folder)
    if source.kind is SourceKind.RELEASE:
        raise SourceNameError(
            f"`{text}` is not a source", f"name a release with megatron_core, without source; or {_FORMS}"
        )
    return source.requirement


def local_path(source: str) -> Path | None:
    """The file or folder of an installable source; None if it is in a repository or on another host."""
    if source.startswith("/"):
        return Path(source)
    address = source.partition("@")[2].strip()
    return Path(unquote(urlsplit(address).path)) if address.startswith("file://") else None


def _split(address: str) -> SplitResult:
    """The parts of an address; a text without ``://`` is a path."""
    if "://" not in address:
        return SplitResult("", "", address, "", "")
    try:
        return urlsplit(address)
    except ValueError as error:
        raise SourceNameError(f"`{address}` is not an address ({error})") from error


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user: the tilde is part of a name
        return Path(text)


def _repository(text: str, address: str, parts: SplitResult) -> Source:
    place, separator, ref = parts.path.rpartition("@")
    if not separator:
        place, ref = parts.path, ""
    local = parts.scheme == "git+file"
    if not place.strip("/") or (separator and not ref) or not (local or parts.netloc):
        raise SourceNameError(f"`{text}` lacks a repository or a ref")
    place, ref = unquote(place), unquote(ref)
    scheme = parts.scheme.removeprefix("git+")
    return Source(
        SourceKind.GIT,
        path=Path(place) if local else None,
        address=address,
        repository=place if local else f"{scheme}://{parts.netloc}{place}",
        ref=ref or None,
    )


def _address(text: str) -> str:
    """The address of ``name @ address``; other texts as they are. A path is taken there too, as installers do."""
    named = _NAMED.fullmatch(text)
    if named and canonicalize_name(named[1]) == _NAME:
        return named[2]
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return text
    if requirement.url is None:
        return text
    if canonicalize_name(requirement.name) != _NAME:
        raise SourceNameError(f"`{text}` names {requirement.name}", f"it must be {_NAME}")
    return requirement.url


def _pinned(text: str) -> str | None:
    """The release that a version or a pinned requirement names."""
    if versions.parse(text) is not None:
        return text
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    if not requirement.specifier:
        return None
    if canonicalize_name(requirement.name) != _NAME:
        raise SourceNameError(f"`{text}` names {requirement.name}", f"it must be {_NAME}")
    pins = [one.version for one in requirement.specifier if one.operator in {"==", "==="}]
    if len(pins) != 1 or len(list(requirement.specifier)) != 1 or versions.parse(pins[0]) is None:
        raise SourceNameError(f"`{text}` does not name one release", f"pin it: {_NAME}==0.18.2")
    return pins[0]


def _own_wheel(name: str, text: str) -> None:
    if not name.endswith(".whl"):
        return
    try:
        found = parse_wheel_filename(name)[0]
    except InvalidWheelFilename as exc:
        raise SourceNameError(f"`{text}` is not named as wheels are", "keep the name that it was built with") from exc
    if found != _NAME:
        raise SourceNameError(f"`{text}` is a wheel of {found}", f"it must be one of {_NAME}")
