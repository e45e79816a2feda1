"""A source tree as data: the Python files of one megatron-core, read without unpacking or running anything.

A wheel, an sdist, a directory (checkout, site-packages, virtual environment) and a git ref all become one
:class:`SourceTree`: relative path to text, held in memory (about 6 MB). Nothing is written to disk, so a bad
archive cannot leave anything behind.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mcore_compat.errors import UsageError

__all__ = [
    "MAX_ARCHIVE_BYTES",
    "BrokenSourceError",
    "NotMegatronError",
    "SourceError",
    "SourceTooLargeError",
    "SourceTree",
    "UnsafeArchiveError",
    "decode_source",
    "read_directory",
    "read_sdist",
    "read_wheel",
    "wanted",
]

# A megatron-core wheel is 2-3 MB, a full checkout's megatron/core 8 MB of text. The limits are ten times that and
# more, so they stop a wrong or hostile file long before memory does.
MAX_ARCHIVE_BYTES = 100 * 1024 * 1024
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_TOTAL_BYTES = 64 * 1024 * 1024
MAX_UNPACKED_BYTES = 128 * 1024 * 1024  # of all members: an installer writes those too that the contract does not read
MAX_MEMBERS = 50_000

_METADATA_FILES = frozenset({"pyproject.toml", "setup.py", "PKG-INFO", "megatron/core/requirements.txt"})


class SourceError(UsageError):
    """A candidate's source cannot be read."""


class NotMegatronError(SourceError):
    """There is no ``megatron/core`` in it."""


class BrokenSourceError(SourceError):
    """A truncated or damaged archive, or a file that is not text."""


class UnsafeArchiveError(SourceError):
    """An archive with members that point outside of it."""


class SourceTooLargeError(SourceError):
    """A file far larger than any megatron-core."""


@dataclass(frozen=True)
class SourceTree:
    """The files that matter of one source.

    Attributes:
        name: short label: file name, directory name, or git ref; never an absolute path.
        kind: ``wheel``, ``sdist``, ``directory`` or ``git``.
        files: posix path relative to the root that holds ``megatron/`` to text.
        commit: full commit id of a git source.
        extras: what a wheel installs beside ``megatron`` and its own metadata, in words; other kinds have none.
    """

    name: str
    kind: str
    files: Mapping[str, str] = field(repr=False)
    commit: str | None = None
    extras: tuple[str, ...] = ()

    def require_megatron(self) -> SourceTree:
        """Return self, or say what it is instead.

        Raises:
            NotMegatronError: there is no ``megatron/core/__init__.py``.
        """
        if "megatron/core/__init__.py" in self.files:
            return self
        named = next((_project_name(text) for path, text in self.files.items() if path.endswith("METADATA")), None)
        called = f"; its metadata names it {named!r}" if named else ""
        raise NotMegatronError(
            f"{self.name} has no megatron/core/__init__.py{called}.",
            "give a megatron-core wheel, sdist, checkout, site-packages folder, or git+file:///repository@ref.",
        )


def _project_name(metadata: str) -> str | None:
    return next((line[6:].strip() for line in metadata.splitlines() if line.startswith("Name: ")), None)


def wanted(path: str) -> bool:
    """Whether the contract needs this file: megatron.core's Python and the distribution's metadata."""
    if path.startswith("megatron/core/") and path.endswith(".py"):
        return True
    return path in _METADATA_FILES or path.endswith(".dist-info/METADATA")


def decode_source(path: str, data: bytes, origin: str) -> str:
    """Text of a source file.

    Raises:
        BrokenSourceError: not UTF-8, or holding NUL bytes.
        SourceTooLargeError: above the limit for one file.
    """
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(f"{path} in {origin}", len(data), MAX_FILE_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BrokenSourceError(f"{path} in {origin} is not UTF-8 text ({error.reason}).", _GET_AGAIN) from error
    if "\0" in text:
        raise BrokenSourceError(f"{path} in {origin} holds NUL bytes.", _GET_AGAIN)
    return text


_NO_TOOL = "do not install this file; no packaging tool makes such a member."
# Python runs these by itself, in every process of the environment; pytest reads a conftest.
_START_UP = frozenset({"sitecustomize.py", "usercustomize.py", "conftest.py"})
_GET_AGAIN = "get the file again and compare its hash with the index's."


def _too_large(what: str, size: int, limit: int) -> SourceTooLargeError:
    return SourceTooLargeError(
        f"{what} is {size / 1e6:.0f} MB; the limit is {limit / 1e6:.0f} MB.",
        "check that this is a megatron-core and not another file.",
    )


def _collect(origin: str, members: Iterable[tuple[str, Callable[[], bytes]]]) -> dict[str, str]:
    """Read the wanted members under the limits; ``members`` gives safe relative paths and readers."""
    files: dict[str, str] = {}
    total = 0
    for path, read in members:
        if not wanted(path):
            continue
        text = decode_source(path, read(), origin)
        total += len(text)
        if total > MAX_TOTAL_BYTES:
            raise _too_large(f"the Python source in {origin}", total, MAX_TOTAL_BYTES)
        files[path] = text
    return files


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_ARCHIVE_BYTES:
        raise _too_large(path.name, size, MAX_ARCHIVE_BYTES)


def _safe_member(name: str, origin: str) -> str:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or (pure.parts and ":" in pure.parts[0]):
        raise UnsafeArchiveError(
            f"{origin} has a member that points outside of it: {name!r}.",
            _NO_TOOL,
        )
    return str(pure)


def read_wheel(path: Path) -> SourceTree:
    """Read a wheel (or another zip whose root holds ``megatron/``).

    Raises:
        SourceError: too large, damaged, unsafe, or not megatron-core.
    """
    _check_size(path)
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            _check_wheel_members(path.name, infos)
            names = [(_safe_member(info.filename, path.name), info) for info in infos]

            def reader(info: zipfile.ZipInfo) -> Callable[[], bytes]:
                def read() -> bytes:
                    if info.file_size > MAX_FILE_BYTES:  # before inflating: a zip bomb says its size here
                        raise _too_large(f"{info.filename} in {path.name}", info.file_size, MAX_FILE_BYTES)
                    with archive.open(info) as stream:
                        return stream.read(MAX_FILE_BYTES + 1)

                return read

            files = _collect(path.name, ((name, reader(info)) for name, info in names if not info.is_dir()))
            extras = _extras({name: reader(info) for name, info in names if not info.is_dir()})
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BrokenSourceError(f"{path.name} is not a readable zip file ({error}).", _GET_AGAIN) from error
    return SourceTree(path.name, "wheel", files, extras=extras).require_megatron()


def _check_wheel_members(origin: str, infos: Sequence[zipfile.ZipInfo]) -> None:
    """Look at every member's entry in the directory, before anything is inflated.

    Raises:
        SourceTooLargeError: too many members, or too large all together.
        UnsafeArchiveError: a link, or two members of one name.
    """
    if len(infos) > MAX_MEMBERS:
        raise SourceTooLargeError(f"{origin} has {len(infos)} members.", "check what this file is.")
    total = sum(info.file_size for info in infos)
    if total > MAX_UNPACKED_BYTES:
        largest = max(infos, key=lambda info: info.file_size)
        what = f"{origin} unpacked (its largest member is {largest.filename!r})"
        raise _too_large(what, total, MAX_UNPACKED_BYTES)
    names = Counter(str(PurePosixPath(info.filename)) for info in infos)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise UnsafeArchiveError(f"{origin} has two members named {twice!r}.", _NO_TOOL)
    link = next((info for info in infos if stat.S_ISLNK(info.external_attr >> 16)), None)
    if link is not None:
        raise UnsafeArchiveError(f"{origin} has a link, {link.filename!r}.", _NO_TOOL)


def _extras(members: Mapping[str, Callable[[], bytes]]) -> tuple[str, ...]:
    """What else an installer would put in place: other packages, start-up files, scripts, entry points."""
    found: set[str] = set()
    for name, read in members.items():
        head, _, rest = name.partition("/")
        if head.endswith(".data"):
            scheme, _, rest = rest.partition("/")
            if scheme not in {"purelib", "platlib"}:
                found.add(f"{scheme} {rest}")
                continue
            head = rest.partition("/")[0]
        if head.endswith(".dist-info"):
            if name.endswith("/entry_points.txt"):
                found |= {f"entry point {line}" for line in _entry_points(read())}
        elif head.endswith(".pth") or head in _START_UP:
            found.add(f"start-up file {head}")
        elif head != "megatron":
            found.add(f"top-level name {head}")
    return tuple(sorted(found))


def _entry_points(data: bytes) -> Iterator[str]:
    group = ""
    for line in data[:MAX_FILE_BYTES].decode("utf-8", errors="replace").splitlines():
        text = line.strip()
        if text.startswith("["):
            group = text.strip("[]")
        elif text and not text.startswith("#"):
            yield f"{group}: {text}"


def read_sdist(path: Path) -> SourceTree:
    """Read a ``.tar.gz`` source distribution; its one top folder is left out of the paths.

    Raises:
        SourceError: too large, damaged, unsafe, or not megatron-core.
    """
    _check_size(path)
    files: dict[str, str] = {}
    total = unpacked = 0
    odd = ""
    try:
        with tarfile.open(path, "r:*") as archive:
            for count, member in enumerate(archive):
                if count > MAX_MEMBERS:
                    raise SourceTooLargeError(
                        f"{path.name} has over {MAX_MEMBERS} members.", "check what this file is."
                    )
                name = _safe_member(member.name, path.name)
                odd = odd or _odd_member(member)
                unpacked += member.size
                if unpacked > MAX_UNPACKED_BYTES:
                    raise _too_large(f"{path.name} unpacked (up to {name!r})", unpacked, MAX_UNPACKED_BYTES)
                inner = name.partition("/")[2]
                if not member.isfile() or not wanted(inner):
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise _too_large(f"{inner} in {path.name}", member.size, MAX_FILE_BYTES)
                stream = archive.extractfile(member)
                assert stream is not None
                files[inner] = decode_source(inner, stream.read(), path.name)
                total += member.size
                if total > MAX_TOTAL_BYTES:
                    raise _too_large(f"the Python source in {path.name}", total, MAX_TOTAL_BYTES)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise BrokenSourceError(f"{path.name} is not a readable tar file ({error}).", _GET_AGAIN) from error
    tree = SourceTree(path.name, "sdist", files).require_megatron()
    if odd:
        raise UnsafeArchiveError(f"{path.name} has {odd}.", _NO_TOOL)
    return tree


def _odd_member(member: tarfile.TarInfo) -> str:
    """What is wrong with a member of an sdist that is not a file: a device, or a link to outside; "" where nothing."""
    if member.isdev():
        return f"a device or pipe, {member.name!r}"
    if member.issym() or member.islnk():
        start = posixpath.dirname(member.name) if member.issym() else ""
        target = posixpath.normpath(posixpath.join(start, member.linkname))
        if target.startswith(("/", "../")) or target == "..":
            return f"a link that leads outside of it, {member.name!r}"
    return ""


def _python_root(path: Path) -> Path:
    """The folder that holds ``megatron/``: a checkout, site-packages, or a virtual environment's site-packages."""
    if (path / "megatron" / "core").is_dir():
        return path
    if path.name == "megatron" and (path / "core").is_dir():
        return path.parent
    return next(
        (site for site in sorted(path.glob("lib/python3*/site-packages")) if (site / "megatron").is_dir()), path
    )


def read_directory(path: Path) -> SourceTree:
    """Read a checkout's working tree, an unpacked wheel, a site-packages folder or a virtual environment.

    Links that leave the folder are not followed.

    Raises:
        SourceError: not megatron-core, or a file too large or not text.
    """
    root = _python_root(path).resolve()

    def reader(full: Path) -> Callable[[], bytes]:
        def read() -> bytes:
            status = full.stat()
            if not stat.S_ISREG(status.st_mode):
                return b""
            if status.st_size > MAX_FILE_BYTES:
                raise _too_large(f"{full.name} in {path.name}", status.st_size, MAX_FILE_BYTES)
            return full.read_bytes()

        return read

    def members() -> Iterable[tuple[str, Callable[[], bytes]]]:
        for name in sorted(_METADATA_FILES - {"megatron/core/requirements.txt"}):
            if (root / name).is_file():
                yield name, reader(root / name)
        for metadata in sorted(root.glob("megatron_core-*.dist-info/METADATA")):
            yield metadata.relative_to(root).as_posix(), reader(metadata)
        for folder, _, names in sorted(os.walk(root / "megatron" / "core")):
            for name in sorted(names):
                full = Path(folder, name)
                if full.resolve().is_relative_to(root):
                    yield full.relative_to(root).as_posix(), reader(full)

    return SourceTree(path.resolve().name, "directory", _collect(path.name, members())).require_megatron()
