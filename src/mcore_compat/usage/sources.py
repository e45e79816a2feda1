"""The adopter's source as text: a folder, a wheel, an sdist, a commit, or a published package. Nothing is run."""

from __future__ import annotations

import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, NoSuchProjectError, PyPISimple

from mcore_compat.contract.source.git import describe_commit, git, is_repository, resolve_commit
from mcore_compat.contract.source.tree import SourceError
from mcore_compat.releases import IndexUnreachableError, cache_directory

__all__ = ["AdopterSource", "NoPythonError", "open_source", "patch_files"]

_FORMS = "give a folder, a .whl, a .tar.gz, package==version, or git+file:///repository@ref."
_MAX_BYTES = 4 * 1024 * 1024
_SKIPPED = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages", ".nox", ".tox", "build"})
_MARK = b"megatron"


class NoPythonError(SourceError):
    """The source has no Python files."""


@dataclass(frozen=True)
class AdopterSource:
    """Files of one adopter that may speak of Megatron.

    Attributes:
        name: short label, without any absolute path.
        version: release or commit, "" where there is none.
        files: posix path to text: Python, ``.patch`` and ``.diff`` files that contain the word ``megatron``.
        total: how many Python files there are.
        paths: of all Python files, also of those that are not in ``files``.
    """

    name: str
    version: str
    files: dict[str, str] = field(repr=False)
    total: int = 0
    paths: tuple[str, ...] = field(default=(), repr=False)


def open_source(text: str, *, include: tuple[str, ...] = ()) -> AdopterSource:
    """Read what the caller named.

    Args:
        text: a folder, a file, a requirement such as ``verl==0.9.1``, or ``git+file://…@ref``.
        include: only files below these folders; all but tests where empty.

    Raises:
        SourceError: it names nothing that can be read.
        IndexUnreachableError: a package cannot be had from the index.
    """
    if text.startswith("git+"):
        return _from_git(text, include)
    path = Path(text.removeprefix("file://")).expanduser()
    if path.is_dir():
        return _of(path.resolve().name, "", _folder_files(path.resolve()), include)
    if path.is_file():
        return _from_archive(path, path.name, "", include)
    return _from_index(text, include)


def _interesting(path: str) -> bool:
    return path.endswith((".py", ".patch", ".diff"))


def _of(name: str, version: str, members: Iterator[tuple[str, bytes]], include: tuple[str, ...]) -> AdopterSource:
    files: dict[str, str] = {}
    paths = []
    for path, data in members:
        if not _kept(path, include):
            continue
        if path.endswith(".py"):
            paths.append(path)
        if _MARK in data and len(data) <= _MAX_BYTES:
            files[path] = data.decode("utf-8", "replace")
    if not paths:
        raise NoPythonError(f"{name} has no Python files.", _FORMS)
    return AdopterSource(name, version, dict(sorted(files.items())), len(paths), tuple(sorted(paths)))


def _kept(path: str, include: tuple[str, ...]) -> bool:
    if include:
        return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in include)
    parts = PurePosixPath(path).parts
    return not any(part in _SKIPPED or part in {"tests", "test"} for part in parts[:-1])


def _folder_files(root: Path) -> Iterator[tuple[str, bytes]]:
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(names):
            full = Path(folder, name)
            if _interesting(name) and full.is_file() and full.stat().st_size <= _MAX_BYTES:
                yield full.relative_to(root).as_posix(), full.read_bytes()


def _from_archive(path: Path, name: str, version: str, include: tuple[str, ...]) -> AdopterSource:
    try:
        if path.name.endswith((".whl", ".zip")):
            return _of(name, version, _zip_files(path), include)
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            return _of(name, version, _tar_files(path), include)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise SourceError(f"{name} is not a readable archive ({error}).", "get the file again.") from error
    raise SourceError(f"{name} is not a wheel or an sdist.", _FORMS)


def _zip_files(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if _interesting(info.filename) and info.file_size <= _MAX_BYTES:
                yield info.filename, archive.read(info)


def _tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            if member.isfile() and _interesting(inner) and member.size <= _MAX_BYTES:
                stream = archive.extractfile(member)
                if stream is not None:
                    yield inner, stream.read()


def _from_git(text: str, include: tuple[str, ...]) -> AdopterSource:
    parts = urlsplit(text.removeprefix("git+"))
    place, _, ref = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "HEAD")
    repository = Path(unquote(place))
    if parts.scheme != "file" or not is_repository(repository):
        raise SourceError(f"{text!r} is not a local git repository.", "clone it, then give git+file:///clone@ref.")
    commit = resolve_commit(repository, unquote(ref))
    name = repository.parent.name if repository.name in {"repo", ".git"} else repository.name
    when = describe_commit(repository, commit).split(" ", 2)
    return _of(name.removesuffix(".git"), f"{commit[:12]} {when[1]}", _git_files(repository, commit), include)


def _git_files(repository: Path, commit: str) -> Iterator[tuple[str, bytes]]:
    listing = git(repository, ["ls-tree", "-r", "-z", "--long", "--full-tree", commit]).decode(errors="replace")
    blobs = []
    for row in filter(None, listing.split("\0")):
        head, _, path = row.partition("\t")
        mode, kind, blob, size = head.split()
        if kind == "blob" and mode != "120000" and _interesting(path) and int(size) <= _MAX_BYTES:
            blobs.append((path, blob))
    data = git(repository, ["cat-file", "--batch"], stdin="".join(f"{blob}\n" for _, blob in blobs).encode())
    offset = 0
    for path, _ in blobs:
        end = data.index(b"\n", offset)
        length = int(data[offset:end].rpartition(b" ")[2])
        yield path, data[end + 1 : end + 1 + length]
        offset = end + 2 + length


def _from_index(text: str, include: tuple[str, ...]) -> AdopterSource:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise SourceError(f"{text!r} is neither a path nor a package.", _FORMS) from error
    names = (os.environ.get(name) for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    address = next(filter(None, names), PYPI_SIMPLE_ENDPOINT)
    try:
        with PyPISimple(address) as client:
            package = _best(client.get_project_page(requirement.name, timeout=60).packages, requirement)
            if package is None:
                raise SourceError(f"The index has no readable file of {text}.", "name another version.")
            target = cache_directory() / "adopters" / package.filename
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    part = Path(folder, package.filename)
                    client.download_package(package, part, verify=True, timeout=300)
                    part.replace(target)
    except (requests.RequestException, NoSuchProjectError) as error:
        raise IndexUnreachableError(
            f"The index did not give {requirement.name} ({type(error).__name__}).", "give a folder or a file instead."
        ) from error
    return _from_archive(target, requirement.name, package.version or "", include)


def _best(packages: list[DistributionPackage], requirement: Requirement) -> DistributionPackage | None:
    """A wheel rather than an sdist, of the newest version that the requirement allows."""

    def order(package: DistributionPackage) -> tuple[Version, bool]:
        return Version(package.version or "0"), package.filename.endswith(".whl")

    fitting = []
    for package in packages:
        try:
            parsed = Version(package.version or "")
        except InvalidVersion:
            continue
        exact = bool(requirement.specifier) and requirement.specifier.contains(parsed, prereleases=True)
        if package.package_type in {"wheel", "sdist"} and (
            exact or (not requirement.specifier and not parsed.is_prerelease)
        ):
            fitting.append(package)
    return max(fitting, key=order, default=None)


def patch_files(source: AdopterSource) -> tuple[tuple[str, str], ...]:
    """Path and text of the source's patch files."""
    return tuple((path, text) for path, text in source.files.items() if path.endswith((".patch", ".diff")))
