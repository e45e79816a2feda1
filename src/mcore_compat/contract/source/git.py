"""Read a commit's megatron/core out of a git repository, bare or checked out, without a checkout of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mcore_compat.contract.source.tree import (
    MAX_FILE_BYTES,
    MAX_TOTAL_BYTES,
    SourceError,
    SourceTooLargeError,
    SourceTree,
    decode_source,
    wanted,
)

__all__ = ["GitError", "commits_between", "describe_commit", "git", "is_repository", "read_git", "resolve_commit"]

# A repository is somebody else's data: no hook, no file-system monitor, no lazy fetch and no prompt may run for it.
_SAFE_CONFIG = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never")
_SAFE_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
_TIMEOUT_SECONDS = 120


class GitError(SourceError):
    """A repository, ref or object that git cannot give."""


def git(repository: Path, arguments: Sequence[str], *, stdin: bytes = b"") -> bytes:
    """Run one read-only git command in ``repository`` and return its standard output.

    Raises:
        GitError: git is missing, ran too long, or failed; its own last line is in the message.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", *_SAFE_CONFIG, "-C", str(repository), *arguments]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
            env={**environment, **_SAFE_ENVIRONMENT},
        )
    except FileNotFoundError as error:
        raise GitError("git is not installed.", "install git, or give a wheel or a folder instead.") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {arguments[0]} took over {_TIMEOUT_SECONDS} s.", "check the repository.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitError(
            f"git {arguments[0]} failed in {repository.name}: {said[-1] if said else 'no message'}",
            "check the repository and the ref; `git -C <repository> log <ref>` must work.",
        )
    return done.stdout


def is_repository(path: Path) -> bool:
    """Whether ``path`` is itself a bare repository or the top of a checkout (not a folder inside one)."""
    return (path / ".git").exists() or ((path / "HEAD").is_file() and (path / "objects").is_dir())


def resolve_commit(repository: Path, ref: str) -> str:
    """Full commit id of a branch, tag, commit or expression such as ``main~3``.

    Raises:
        GitError: there is no such commit.
    """
    if not is_repository(repository):
        raise GitError(f"{repository.name} is not a git repository.", "give the path of a checkout or bare repository.")
    try:
        found = git(repository, ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"])
    except GitError as error:
        raise GitError(
            f"{repository.name} has no commit {ref!r}.",
            "fetch it first, or name an existing branch, tag or commit (`git branch -a`, `git tag`).",
        ) from error
    return found.decode().strip()


def read_git(repository: Path, ref: str) -> SourceTree:
    """Read one commit.

    Raises:
        GitError: no repository, no such ref, or damaged objects.
        SourceError: the commit is not megatron-core, or is too large.
    """
    commit = resolve_commit(repository, ref)
    listing = git(repository, ["ls-tree", "-r", "-z", "--long", "--full-tree", commit]).decode(errors="replace")
    blobs: list[tuple[str, str]] = []
    total = 0
    for row in filter(None, listing.split("\0")):
        head, _, path = row.partition("\t")
        mode, kind, blob, size = head.split()
        if kind != "blob" or mode == "120000" or not wanted(path):
            continue
        if int(size) > MAX_FILE_BYTES or (total := total + int(size)) > MAX_TOTAL_BYTES:
            raise SourceTooLargeError(f"{path} in {ref} is too large ({size} bytes).", "check what this commit is.")
        blobs.append((path, blob))
    data = git(repository, ["cat-file", "--batch"], stdin="".join(f"{blob}\n" for _, blob in blobs).encode())
    files: dict[str, str] = {}
    offset = 0
    for path, blob in blobs:
        end = data.index(b"\n", offset)
        head_words = data[offset:end].split()
        if len(head_words) != 3:
            raise GitError(f"object {blob} of {path} is missing.", "run `git fsck`; a partial clone lacks objects.")
        size_bytes = int(head_words[2])
        files[path] = decode_source(path, data[end + 1 : end + 1 + size_bytes], f"{repository.name}@{ref}")
        offset = end + 2 + size_bytes
    name = f"{repository.name.removesuffix('.git')}@{ref}"
    return SourceTree(name, "git", files, commit).require_megatron()


def commits_between(repository: Path, good: str, bad: str, paths: Sequence[str] = ("megatron/core",)) -> list[str]:
    """Commits after ``good`` up to and with ``bad`` that touch ``paths``, oldest first, along first parents.

    Raises:
        GitError: a ref is missing, or ``good`` is not an ancestor of ``bad``.
    """
    old, new = resolve_commit(repository, good), resolve_commit(repository, bad)
    try:
        git(repository, ["merge-base", "--is-ancestor", old, new])
    except GitError as error:
        raise GitError(
            f"{good} is not an ancestor of {bad}.",
            "bisect along one line of history: give a good commit from which the bad one descends.",
        ) from error
    listed = git(repository, ["rev-list", "--first-parent", "--reverse", f"{old}..{new}", "--", *paths])
    return listed.decode().split()


def describe_commit(repository: Path, commit: str) -> str:
    """Short id, date and subject of a commit, one line."""
    return git(repository, ["show", "-s", "--format=%h %cs %s", commit]).decode(errors="replace").strip()
