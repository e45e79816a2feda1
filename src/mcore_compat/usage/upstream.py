"""An upstream tree as paths and content keys; a file's text is read only when its summary is not in the cache."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_compat.contract.source.candidate import Candidate, CandidateKind, open_candidate
from mcore_compat.contract.source.git import git, resolve_commit
from mcore_compat.contract.source.tree import MAX_FILE_BYTES, BrokenSourceError, SourceError
from mcore_compat.releases import Release, cache_directory
from mcore_compat.usage.summary import FORMAT, summarise

__all__ = ["SummaryCache", "UpstreamTree", "git_tree", "open_upstream", "tree_of_texts"]

_NATIVE = (".so", ".cpp", ".cu", ".pyx", ".pyd")


@dataclass(frozen=True)
class UpstreamTree:
    """Files below ``megatron/`` of one Megatron.

    Attributes:
        label: short name, as ``0.18.2`` or ``Megatron-LM@main``.
        keys: path of each Python file to a key of its content.
        native: paths of compiled or compilable modules, which are not read.
        read: gives a file's text by its path.
        commit: full id of a git tree.
        blobs: reads a git object, of a git tree.
    """

    label: str
    keys: Mapping[str, str] = field(repr=False)
    native: frozenset[str] = field(default=frozenset(), repr=False)
    read: Callable[[str], str] = field(default=lambda _: "", repr=False)
    commit: str | None = None
    blobs: Callable[[str], str] | None = field(default=None, repr=False)

    def reader(self, keys: Mapping[str, str]) -> Callable[[str], str]:
        """Reads files of another commit of the same repository, whose objects are ``keys``."""
        blobs = self.blobs
        assert blobs is not None
        return lambda path: blobs(keys[path])


class SummaryCache:
    """Summaries by content key: in memory, and on disk between runs."""

    def __init__(self, path: Path | None = None) -> None:
        """A cache.

        Args:
            path: the database; ``usage-N.sqlite`` in the user's cache folder where None.
        """
        self._path = path or cache_directory() / f"usage-{FORMAT}.sqlite"
        self._memory: dict[str, dict[str, Any]] = {}
        self._shipped: Mapping[str, str] = {}
        self._connection: sqlite3.Connection | None = None
        self.parsed = 0

    def ship(self, texts: Mapping[str, str]) -> None:
        """Use summaries that came with the distribution: JSON texts by key, parsed one by one when asked for."""
        self._shipped = texts

    def get(self, key: str, text: Callable[[], str]) -> dict[str, Any]:
        """The summary of a content; ``text`` is called only if it is not known."""
        known = self._memory.get(key)
        if known is None and key in self._shipped:
            known = self._memory[key] = json.loads(self._shipped[key])
        if known is None:
            packed = self._stored(key)
            if packed is None:
                packed = zlib.compress(json.dumps(summarise(text()), separators=(",", ":")).encode(), 3)
                self.parsed += 1
                self._store(key, packed)
            known = self._memory[key] = json.loads(zlib.decompress(packed))
        return known

    def close(self) -> None:
        """Write and close the database."""
        if self._connection is not None:
            self._connection.commit()
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=60, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=OFF")
            self._connection.execute("CREATE TABLE IF NOT EXISTS summary (key TEXT PRIMARY KEY, data BLOB)")
        return self._connection

    def _stored(self, key: str) -> bytes | None:
        try:
            row = self._open().execute("SELECT data FROM summary WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error:  # an unusable cache costs time, not correctness
            return None
        return row[0] if row else None

    def _store(self, key: str, packed: bytes) -> None:
        try:
            self._open().execute("INSERT OR REPLACE INTO summary VALUES (?, ?)", (key, packed))
        except sqlite3.Error:
            return


def content_key(data: bytes) -> str:
    """Git's own name of a content, so that a wheel's file and a commit's are the same key."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _mine(path: str) -> bool:
    return path.startswith("megatron/")


def tree_of_texts(label: str, files: Mapping[str, str], commit: str | None = None) -> UpstreamTree:
    """A tree from texts in memory."""
    keys = {path: content_key(text.encode()) for path, text in files.items() if path.endswith(".py") and _mine(path)}
    native = frozenset(path for path in files if path.endswith(_NATIVE))
    return UpstreamTree(label, keys, native, files.__getitem__, commit)


def open_upstream(candidate: Candidate, releases: tuple[Release, ...]) -> UpstreamTree:
    """The tree of whatever a caller named as a Megatron, its other packages beside ``megatron.core`` included.

    Raises:
        SourceError: it cannot be read.
        IndexUnreachableError: a release's file cannot be had.
    """
    if candidate.kind is CandidateKind.GIT and candidate.path is not None:
        return replace(git_tree(candidate.path, candidate.ref), label=candidate.label)
    if candidate.kind is CandidateKind.DIRECTORY and candidate.path is not None:
        return _folder_tree(candidate.path, candidate.label)
    if candidate.kind is CandidateKind.WHEEL and candidate.path is not None:
        return wheel_tree(candidate.path, candidate.label)
    return tree_of_texts(candidate.label, open_candidate(candidate, releases).files)


def wheel_tree(path: Path, label: str) -> UpstreamTree:
    """A wheel's files.

    Raises:
        SourceError: it is damaged or is not a megatron-core.
    """
    files: dict[str, str] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if _mine(info.filename) and info.filename.endswith((".py", *_NATIVE)):
                    python = info.filename.endswith(".py") and info.file_size <= MAX_FILE_BYTES
                    files[info.filename] = archive.read(info).decode("utf-8-sig", "replace") if python else ""
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BrokenSourceError(f"{path.name} is not a readable zip file ({error}).", "get the file again.") from error
    return _checked(tree_of_texts(label, files))


def _folder_tree(path: Path, label: str) -> UpstreamTree:
    root = next((site for site in sorted(path.glob("lib/python3*/site-packages"))), path)
    files = {
        full.relative_to(root).as_posix(): full
        for full in sorted((root / "megatron").rglob("*"))
        if full.suffix in {".py", *_NATIVE} and full.is_file()
    }
    texts = {
        name: full.read_text(encoding="utf-8-sig", errors="replace") if full.suffix == ".py" else ""
        for name, full in files.items()
    }
    return _checked(tree_of_texts(label, texts))


def _checked(tree: UpstreamTree) -> UpstreamTree:
    if not any(path.startswith("megatron/core/") for path in tree.keys):
        raise SourceError(f"{tree.label} has no megatron/core.", "give a megatron-core wheel, folder or commit.")
    return tree


class _Blobs:
    """One ``git cat-file --batch`` that stays open, for many small reads."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, blob: str) -> str:
        if self._process is None:
            command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(self._repository), "cat-file", "--batch"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{blob}\n".encode())
        self._process.stdin.flush()
        head = self._process.stdout.readline().split()
        if len(head) != 3:
            raise SourceError(f"object {blob} is missing.", "run `git fsck`; a partial clone lacks objects.")
        data = self._process.stdout.read(int(head[2]))
        self._process.stdout.read(1)
        return data.decode("utf-8-sig", "replace")

    def __del__(self) -> None:
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process.wait()


_OPEN: dict[Path, _Blobs] = {}


def git_tree(repository: Path, ref: str) -> UpstreamTree:
    """A commit's files; their content is read one by one when it is asked for.

    Raises:
        GitError: no repository or no such commit.
    """
    commit = resolve_commit(repository, ref)
    listing = git(repository, ["ls-tree", "-r", "-z", "--full-tree", commit, "megatron"]).decode(errors="replace")
    blobs: dict[str, str] = {}
    native = set()
    for row in filter(None, listing.split("\0")):
        head, _, path = row.partition("\t")
        if path.endswith(".py") and not head.startswith("120000"):
            blobs[path] = head.split()[2]
        elif path.endswith(_NATIVE):
            native.add(path)
    reader = _OPEN.setdefault(repository, _Blobs(repository))
    label = f"{repository.name}@{ref}"
    return _checked(
        UpstreamTree(label, blobs, frozenset(native), lambda path: reader.read(blobs[path]), commit, reader.read)
    )
