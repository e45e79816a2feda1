"""Which implementation the suite is to judge: chosen on the command line, checked before any environment is made.

The suite itself loads it (:mod:`mcore_compat.subjects.protocol`); here it is only found and named.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mcore_compat import versions
from mcore_compat.errors import UsageError
from mcore_compat.project import Project
from mcore_compat.subjects.protocol import BUILT_IN, DEFAULT_SUBJECT, FORMS, SubjectNameError, parse_subject
from mcore_compat.subjects.published import PEERS, Peer, peer_in_cpu_cells

__all__ = ["BUILT_IN", "DEFAULT_SUBJECT", "OURS", "ChosenSubject", "choose_subject", "subject_of"]


@dataclass(frozen=True)
class ChosenSubject:
    """The implementation under test.

    Attributes:
        name: as reports name it; never an absolute path.
        variable: the value of ``MCORE_COMPAT_SUBJECT``; "": the suite judges no fused forward but the project itself.
        digest: of what decides its behaviour as far as it is known here: the name, the file's content, or the package.
        peer: the published package that it is, if it is one.
    """

    name: str = DEFAULT_SUBJECT
    variable: str = DEFAULT_SUBJECT
    digest: str = DEFAULT_SUBJECT
    peer: Peer | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is this project's own library, of which every declared check is asked."""
        return self.variable == DEFAULT_SUBJECT

    @property
    def file(self) -> Path | None:
        """The file that it is read from; None if it is in a package."""
        return Path(self.variable.rpartition(":")[0]) if self.variable.startswith("/") else None

    @property
    def is_fused(self) -> bool:
        """Whether it is a fused forward, which has a mode, capabilities and counters."""
        return bool(self.variable)

    @classmethod
    def of_suite(cls, name: str) -> Self:
        """The subject of an ordinary suite: the project of this name, whatever its tests call."""
        return cls(name, "", name)


OURS = ChosenSubject()
_VERSION_OR_CHECKOUT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+?)(?:==(?P<version>\S+)|@(?P<checkout>.+))")


def choose_subject(text: str, lane: str = "cpu") -> ChosenSubject:
    """Understand what was typed.

    Args:
        text: a built-in name, ``path/to/file.py:Class``, or ``package.module:Class`` of a package that the cells'
            requirements in ``matrix.toml`` bring in.
        lane: of the cells that are to judge it.

    Raises:
        UsageError: there is no such name, file or class, or it cannot run in this lane.
    """
    if text in PEERS:
        return _of_peer(text, PEERS[text], lane)
    match = _VERSION_OR_CHECKOUT.fullmatch(text)
    if match is not None and match["name"] in PEERS:
        return _of_version(match["name"], match["version"], match["checkout"], lane)
    try:
        spec = parse_subject(text)
    except SubjectNameError:
        near = difflib.get_close_matches(text, BUILT_IN, n=1)
        hint = f"Did you mean `{near[0]}`? " if near else ""
        raise UsageError(f"There is no subject `{text}`.", f"{hint}Allowed: {FORMS}.") from None
    if spec.kind == "file":
        return _of_file(Path(spec.place), spec.attribute)
    return ChosenSubject(text, text, text)


def subject_of(project: Project, text: str | None, lane: str = "cpu") -> ChosenSubject:
    """What the suite of a project judges.

    Args:
        project: its settings may name a subject; the file of one is relative to its root.
        text: what was typed; None: nothing was.
        lane: of the cells that are to judge it.

    Returns:
        The subject that was typed, else the one of the settings; for another project without one, the project itself.

    Raises:
        UsageError: there is no such name, file or class, or it cannot run in this lane.
    """
    if text is not None:
        return choose_subject(text, lane)
    named = project.settings.subject
    if named is None:
        return ChosenSubject.of_suite(project.title) if project.is_adopter else OURS
    if ".py:" in named:
        named = str(project.root / named)
    return choose_subject(named, lane)


def _of_peer(name: str, peer: Peer, lane: str) -> ChosenSubject:
    if lane not in peer.lanes:
        step = (
            f"Run `ci/gpu --subject {name}` on a host with one; `{name}=={peer.version}` runs here without its kernel."
        )
        raise UsageError(peer.elsewhere, step)
    return ChosenSubject(name, name, f"{peer.distribution}=={peer.version}:{peer.sha256}", peer)


def _of_version(name: str, version: str | None, checkout: str | None, lane: str) -> ChosenSubject:
    """A version or a checkout of a published package; the pinned one is the same on both lanes."""
    pinned = PEERS[name]
    if lane != "cpu":
        if version == pinned.version:
            return _of_peer(name, pinned, lane)
        raise UsageError(
            f"A GPU host judges {name} {pinned.version}, whose wheel is pinned.",
            f"Name it as `{name}`, or judge this one in CPU cells.",
        )
    folder = None
    if checkout is not None:
        folder = Path(checkout).expanduser().resolve()
        if not (folder / "pyproject.toml").is_file() and not (folder / "setup.py").is_file():
            raise UsageError(f"{folder.name} is not a checkout of {name}.", "Name the folder with its pyproject.toml.")
    elif versions.parse(version or "") is None:
        raise UsageError(f"`{version}` is not a version of {name}.", f"Write it as in {name}=={pinned.version}.")
    peer = peer_in_cpu_cells(name, version, folder)
    said = f"{name} (kernel replaced by torch)"
    return ChosenSubject(said, name, f"{name}:{version or 'checkout'}:torch", peer)


def _of_file(path: Path, attribute: str) -> ChosenSubject:
    try:
        content = path.read_bytes()
        tree = ast.parse(content, filename=path.name)
    except OSError as exc:
        raise UsageError(
            f"The subject's file {path.name} cannot be read: {exc.strerror}.", "Name a file that is there."
        ) from exc
    except (SyntaxError, ValueError) as exc:
        raise UsageError(f"The subject's file {path.name} is no Python: {exc}.", "Correct the file.") from exc
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if attribute not in classes:
        known = f"it has {', '.join(classes)}" if classes else "it has none"
        raise UsageError(
            f"{path.name} has no class `{attribute}` at its top level; {known}.", "Name one as path/to/file.py:Class."
        )
    digest = hashlib.sha256(content).hexdigest()
    return ChosenSubject(f"{path.name}:{attribute}", f"{path.resolve()}:{attribute}", f"{digest}:{attribute}")
