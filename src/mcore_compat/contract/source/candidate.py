"""What a caller may name as a megatron-core: a release, a wheel, an sdist, a folder, a git ref; and opening it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from filelock import FileLock

from mcore_compat.contract.source.git import GitError, git, is_repository, read_git
from mcore_compat.contract.source.tree import SourceError, SourceTree, read_directory, read_sdist, read_wheel
from mcore_compat.files.digest import digest_of_text
from mcore_compat.matrix.source import Source, SourceKind, SourceNameError, parse_source
from mcore_compat.releases import PROJECT, Release, cache_directory, download, find_release

__all__ = ["Candidate", "CandidateKind", "NoSuchCandidateError", "open_candidate", "parse_candidate"]

_FETCH_SECONDS = 600
_FORMS = (
    "Give megatron-core==VERSION, a .whl, a .tar.gz, a folder (checkout, site-packages, virtual environment), "
    "or git+file:///repository@ref."
)


class NoSuchCandidateError(SourceError):
    """The text names nothing that can be opened."""


class CandidateKind(StrEnum):
    """The forms."""

    RELEASE = "release"
    WHEEL = "wheel"
    SDIST = "sdist"
    DIRECTORY = "directory"
    GIT = "git"


@dataclass(frozen=True)
class Candidate:
    """A named megatron-core, not yet opened.

    Attributes:
        kind: the form it was named in.
        label: short name for reports, without any absolute path.
        requirement: what an installer is given; named where it has to be built, since only what is named may be.
        version: of a release.
        path: of a file, folder, or local repository.
        address: of a repository on another host.
        ref: of a repository.
    """

    kind: CandidateKind
    label: str
    requirement: str
    version: str | None = None
    path: Path | None = None
    address: str | None = None
    ref: str = "HEAD"


def parse_candidate(text: str, folder: Path | None = None) -> Candidate:
    """Read what a caller typed; relative paths start at ``folder`` (the working directory where None).

    Raises:
        NoSuchCandidateError: it names nothing that exists, or another project.
    """
    home = folder or Path.cwd()
    name = text.strip()
    try:
        if name and "://" not in name and (home / name).exists():  # a folder may be called 0.18.2
            return _path_candidate((home / name).resolve(), text)
        source = parse_source(text, home)
    except SourceNameError as error:
        raise NoSuchCandidateError(f"{_capital(error.problem)}.", f"{_capital(error.next_step)}.") from error
    except OSError as error:  # a name too long for any file system
        raise NoSuchCandidateError(f"{text[:80]!r} cannot be looked up ({error.strerror}).", _FORMS) from error
    if source.kind is SourceKind.RELEASE:
        assert source.version is not None
        return Candidate(CandidateKind.RELEASE, source.version, source.requirement, version=source.version)
    if source.kind is SourceKind.GIT:
        return _git_candidate(source)
    if source.path is None:
        raise NoSuchCandidateError(f"{text!r} is on another host.", "Download it first, and give the file.")
    if not source.path.exists():
        raise NoSuchCandidateError(f"{text!r} is neither a file, a folder, nor a release.", _FORMS)
    return _path_candidate(source.path, text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _git_candidate(source: Source) -> Candidate:
    assert source.repository is not None
    name = Path(source.repository).name.removesuffix(".git")
    ref = source.ref or "HEAD"
    requirement = source.requirement if source.ref else f"{source.requirement}@{ref}"
    if source.path is not None and not is_repository(source.path):
        raise NoSuchCandidateError(f"{name} is not a git repository.", _FORMS)
    address = None if source.path is not None else source.repository
    return Candidate(CandidateKind.GIT, f"{name}@{ref}", requirement, path=source.path, address=address, ref=ref)


def _path_candidate(path: Path, text: str) -> Candidate:
    requirement = Source(SourceKind.PATH, path=path).requirement
    if path.is_dir():
        bare = is_repository(path) and not (path / ".git").exists()
        if bare:  # a bare repository has no working tree: its HEAD is meant
            label = f"{path.name.removesuffix('.git')}@HEAD"
            return Candidate(CandidateKind.GIT, label, f"{PROJECT} @ git+file://{path}@HEAD", path=path)
        return Candidate(CandidateKind.DIRECTORY, path.name, requirement, path=path)
    if path.name.endswith((".whl", ".zip")):
        return Candidate(CandidateKind.WHEEL, path.name, requirement, path=path)
    if path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return Candidate(CandidateKind.SDIST, path.name, requirement, path=path)
    raise NoSuchCandidateError(f"{text!r} is not a wheel or an sdist.", _FORMS)


def open_candidate(candidate: Candidate, releases: Iterable[Release], cache: Path | None = None) -> SourceTree:
    """Read the candidate's source; a release is downloaded (verified, cached) where it is not here yet.

    Raises:
        SourceError: it cannot be read or is no megatron-core.
        NoSuchReleaseError: the release is not known.
        IndexUnreachableError: the release's file cannot be had.
    """
    if candidate.kind is CandidateKind.RELEASE:
        assert candidate.version is not None
        file = download(find_release(releases, candidate.version), cache)
        return read_wheel(file) if file.name.endswith(".whl") else read_sdist(file)
    if candidate.kind is CandidateKind.GIT:
        if candidate.path is not None:
            return read_git(candidate.path, candidate.ref)
        return read_git(*_fetched(candidate, cache or cache_directory()))
    assert candidate.path is not None
    readers = {
        CandidateKind.WHEEL: read_wheel,
        CandidateKind.SDIST: read_sdist,
        CandidateKind.DIRECTORY: read_directory,
    }
    return readers[candidate.kind](candidate.path)


def _fetched(candidate: Candidate, cache: Path) -> tuple[Path, str]:
    """Bare repository in the cache with the one commit asked for of a repository on another host, and its name there.

    Each ref of the other side has a name of its own here: FETCH_HEAD would be that of whoever fetched last.
    """
    assert candidate.address is not None
    key = digest_of_text(candidate.address)[:16]
    repository = cache / "git" / key / f"{Path(candidate.address).name.removesuffix('.git')}.git"
    name = f"refs/fetched/{digest_of_text(candidate.ref)[:16]}"
    repository.mkdir(parents=True, exist_ok=True)
    fetch = ["fetch", "--quiet", "--depth=1", "--end-of-options", candidate.address, f"+{candidate.ref}:{name}"]
    try:
        with FileLock(repository.parent / ".lock"):
            if not is_repository(repository):
                git(repository, ["init", "--quiet", "--bare"])
            subprocess.run(
                ["git", "-c", "core.hooksPath=/dev/null", "-C", str(repository), *fetch],
                check=True,
                capture_output=True,
                timeout=_FETCH_SECONDS,
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise GitError(
            f"{candidate.label} could not be fetched.", "check address, ref and access; or give a local clone."
        ) from error
    return repository, name
