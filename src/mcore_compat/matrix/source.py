"""Where a megatron-core comes from that is no release on the index, in the one form that an installer takes.

A matrix may name a wheel, an sdist, a folder or a ``git+…`` URL as people write them. An installer wants what it has to
build named (``megatron-core @ …``), since only what is named may be built, and a wheel as a path.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

__all__ = ["installable_source", "local_path"]

_NAME = "megatron-core"
_FORMS = "give a .whl, a .tar.gz, a folder, git+file:///repository@ref or git+https://host/repository@ref"
_GIT = ("git+file", "git+https", "git+ssh")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_NAMED = re.compile(r"([A-Za-z0-9._-]+)\s*@\s*(\S.*)")


def installable_source(text: str, folder: Path) -> str:
    """What the installer is asked for.

    Args:
        text: as written; ``megatron-core @ ADDRESS`` and ``ADDRESS`` are the same.
        folder: where a relative path starts.

    Returns:
        An absolute path of a wheel, or ``megatron-core @ ADDRESS`` with an absolute address. It is not looked at
        whether anything is there.

    Raises:
        ValueError: it names none of these, or another project; the message is ``problem | next step``.
    """
    if not text.isprintable():
        raise ValueError(f"{text!r} is no source | {_FORMS}")
    address = _address(text.strip())
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme in _GIT:
        parts = urlsplit(address)
        if not parts.path.strip("/") or (scheme != "git+file" and not parts.netloc):
            raise ValueError(f"`{text}` lacks a repository | {_FORMS}")
        return f"{_NAME} @ {address}"
    if scheme == "https":
        name = Path(unquote(urlsplit(address).path)).name
        if not name.endswith(_ARCHIVES):
            raise ValueError(f"`{text}` is no wheel or sdist | {_FORMS}")
        _own_wheel(name, text)
        return f"{_NAME} @ {address}"
    if scheme not in {"", "file"}:
        raise ValueError(f"`{scheme}://` is no place to install from | {_FORMS}")
    if not address or (scheme == "" and _is_release(address)):
        raise ValueError(f"`{text}` is no source | name a release with megatron_core, without source; or {_FORMS}")
    path = Path(unquote(urlsplit(address).path) if scheme else address).expanduser()
    path = (folder / path).resolve()
    _own_wheel(path.name, text)
    return str(path) if path.suffix == ".whl" else f"{_NAME} @ {path.as_uri()}"


def local_path(source: str) -> Path | None:
    """The file or folder that an installable source names, or None where it lies in a repository or on another host."""
    if source.startswith("/"):
        return Path(source)
    address = source.partition("@")[2].strip()
    return Path(unquote(urlsplit(address).path)) if address.startswith("file://") else None


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
        raise ValueError(f"`{text}` names {requirement.name} | it must be {_NAME}")
    return requirement.url


def _is_release(text: str) -> bool:
    """A version or a pinned requirement where a place is wanted."""
    try:
        Version(text)
    except InvalidVersion:
        pass
    else:
        return True
    try:
        return bool(Requirement(text).specifier)
    except InvalidRequirement:
        return False


def _own_wheel(name: str, text: str) -> None:
    if not name.endswith(".whl"):
        return
    try:
        found = parse_wheel_filename(name)[0]
    except InvalidWheelFilename as exc:
        raise ValueError(f"`{text}` is not named as wheels are | keep the name that it was built with") from exc
    if found != _NAME:
        raise ValueError(f"`{text}` is a wheel of {found} | it must be one of {_NAME}")
