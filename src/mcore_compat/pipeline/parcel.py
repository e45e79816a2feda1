"""What a node of a cluster needs to judge a cell, as one object: no filesystem is shared with it.

:func:`pack` makes it from a session on the caller's machine; :func:`unpack` makes a session from it on the node, with
the node's own folders. Everything that decides a verdict travels: the sealed suite, the project's wheel (which has the
judge), the data files as read, the plan.
"""

from __future__ import annotations

import datetime as dt
import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_compat.errors import InfrastructureError, UsageError
from mcore_compat.files.digest import digest_of_bytes
from mcore_compat.files.sealed import is_sealed
from mcore_compat.matrix.cells import Cell, Matrix
from mcore_compat.matrix.expectations import Expectations
from mcore_compat.matrix.inventory import Inventory
from mcore_compat.matrix.source import installable_source, local_path
from mcore_compat.pipeline.lanes import PortableLane
from mcore_compat.pipeline.run_folder import RunFolder, RunPlan
from mcore_compat.pipeline.session import RunOptions, Session, scrubber_of
from mcore_compat.project import Project
from mcore_compat.subjects.selection import ChosenSubject

__all__ = ["Parcel", "pack", "unpack"]

# Marks the source of a cell whose wheel travels in the parcel.
_SHIPPED = "shipped:"
# The caller's settings of the installer that decide what is installed; the node's own come first.
_INSTALLER = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_TORCH_BACKEND")


@dataclass(frozen=True)
class Parcel:
    """A session without the caller's machine.

    Attributes:
        plan: of the run.
        options: of the run.
        project: with the caller's paths, which are only named in messages.
        lane: makes the environments; it is opened again on the node.
        matrix: with the cells as the lane's caller knows them.
        inventory: the declared checks.
        expectations: the declared exceptions.
        suite: runs the suite in one cell.
        today: decides which exceptions have expired.
        wheel: content of the project's wheel.
        folders: compressed archives by name: the suite, and what the lane needs.
        files: contents of single files by digest: local wheels that cells are installed from, the subject's file.
        variables: of the caller's environment.
    """

    plan: RunPlan
    options: RunOptions
    project: Project
    lane: PortableLane
    matrix: Matrix
    inventory: Inventory
    expectations: Expectations
    suite: Callable[..., object]
    today: dt.date
    wheel: bytes
    folders: Mapping[str, bytes]
    files: Mapping[str, bytes]
    variables: Mapping[str, str]


def pack(session: Session, host: Mapping[str, str] | None = None) -> Parcel:
    """Everything of a session that its cells depend on.

    Args:
        session: of the run.
        host: the caller's environment variables; default: those of the session.

    Raises:
        UsageError: a cell is installed from a folder of this machine, or the lane cannot run elsewhere.
        InfrastructureError: somebody has changed the copy of the suite.
    """
    if not isinstance(session.lane, PortableLane):
        raise UsageError("This lane runs on this machine only.", "Run with --executor local.")
    _ = session.suite_folder  # still what the plan says
    wanted = {cell.id for cell in session.cells}
    files: dict[str, bytes] = {}
    cells = tuple(_with_source(cell, files) if cell.id in wanted else cell for cell in session.matrix.cells)
    subject = session.options.subject
    if (path := subject.file) is not None:
        content = path.read_bytes()
        files[digest_of_bytes(content)] = content
    given = session.host if host is None else host
    return Parcel(
        plan=session.plan,
        options=session.options,
        project=session.project,
        lane=session.lane.portable(),
        matrix=session.matrix.model_copy(update={"cells": cells}),
        inventory=session.inventory,
        expectations=session.expectations,
        suite=session.suite,
        today=session.today,
        wheel=session.lane.wheel.wheel.read_bytes(),
        folders={"suite": _archive(session.suite_copy)}
        | {name: _archive(folder) for name, folder in session.lane.shipped.items()},
        files=files,
        variables={name: given[name] for name in _INSTALLER if name in given},
    )


def unpack(parcel: Parcel, cell_id: str, store: Path, work: Path, host: Mapping[str, str]) -> Session:
    """The session on a node, for one cell.

    Args:
        parcel: from :func:`pack`.
        cell_id: the cell.
        store: the node's own folder for environments and sources, kept between runs.
        work: an empty folder for this task alone.
        host: the node's environment variables.

    Raises:
        InfrastructureError: something did not arrive as it was sent, or the node lacks a tool.
    """
    host = {**parcel.variables, **host}
    wheel = parcel.lane.wheel
    home = _placed_file(store / "wheels", wheel.sha256, wheel.wheel.name, parcel.wheel)
    suite_digest = parcel.plan.inputs["suite"]
    suite_copy = _placed_folder(store / "suites", parcel.folders["suite"], suite_digest)
    folders = {
        name: _placed_folder(store / "folders", content, None)
        for name, content in parcel.folders.items()
        if name != "suite"
    }
    project = _project(parcel.project, store, work)
    lane = parcel.lane.on_node(project, replace(wheel, wheel=home), host, folders, work)
    options = replace(parcel.options, subject=_subject(parcel, store))
    (asked,) = (cell for cell in parcel.matrix.cells if cell.id == cell_id)
    cells = lane.adapted((_at_node(asked, parcel.files, store),))
    folder = RunFolder.create(project.reports, parcel.plan, scrubber_of(project, lane, host, suite_copy))
    return Session(
        project=project,
        options=options,
        lane=lane,
        matrix=parcel.matrix,
        inventory=parcel.inventory,
        expectations=parcel.expectations,
        cells=cells,
        folder=folder,
        plan=parcel.plan,
        host=host,
        suite_copy=suite_copy,
        suite=parcel.suite,
        today=parcel.today,
    )


def _project(project: Project, store: Path, work: Path) -> Project:
    """The project with the node's folders; its root is only a name for places in the suite."""
    root = work / "project"
    base = root if project.suite_base == project.root else work / "suite"
    return replace(
        project,
        root=root,
        data=root / project.data.name,
        suite=base / project.suite.relative_to(project.suite_base),
        cells=store / "cells",
        reports=work / "reports",
    )


def _with_source(cell: Cell, files: dict[str, bytes]) -> Cell:
    """The cell with the digest of the local wheel that it is installed from in place of the path."""
    path = local_path(cell.source) if cell.source is not None else None
    if path is None:
        return cell
    if not path.is_file():
        raise UsageError(
            f"Cell {cell.id} is installed from {path.name}, a folder of this machine.",
            "Build a wheel of it, or run with --executor local.",
        )
    content = path.read_bytes()
    digest = digest_of_bytes(content)
    files[digest] = content
    return cell.model_copy(update={"source": f"{_SHIPPED}{digest}/{path.name}"})


def _at_node(cell: Cell, files: Mapping[str, bytes], store: Path) -> Cell:
    if cell.source is None or not cell.source.startswith(_SHIPPED):
        return cell
    digest, _, name = cell.source.removeprefix(_SHIPPED).partition("/")
    path = _placed_file(store / "files", digest, name, files[digest])
    return cell.model_copy(update={"source": installable_source(str(path), path.parent)})


def _subject(parcel: Parcel, store: Path) -> ChosenSubject:
    subject = parcel.options.subject
    if subject.file is None:
        return subject
    digest, _, attribute = subject.digest.partition(":")
    path = _placed_file(store / "files", digest, subject.file.name, parcel.files[digest])
    return replace(subject, variable=f"{path}:{attribute}")


def _placed_file(folder: Path, digest: str, name: str, content: bytes) -> Path:
    """The file in a folder named by its digest; written whole or not at all."""
    if digest_of_bytes(content) != digest:
        raise InfrastructureError(f"{name} did not arrive as it was sent.", "Run the cell again.")
    path = folder / digest[:32] / name
    if not path.is_file() or digest_of_bytes(path.read_bytes()) != digest:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{name}.{secrets.token_hex(4)}")
        fresh.write_bytes(content)
        fresh.replace(path)
    return path


def _placed_folder(store: Path, content: bytes, digest: str | None) -> Path:
    """The archive's folder, named by its digest; ``digest`` is that of the sealed tree if it is known."""
    target = store / (digest or digest_of_bytes(content))[:32]
    if target.is_dir() and (digest is None or is_sealed(target, digest)):
        return target
    store.mkdir(parents=True, exist_ok=True)
    fresh = store / f".{secrets.token_hex(8)}"
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            archive.extractall(fresh, filter="data")
        if digest is not None and not is_sealed(fresh, digest):
            raise InfrastructureError("The suite did not arrive as it was sent.", "Run the cell again.")
        _exchange(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _exchange(fresh: Path, target: Path) -> None:
    """Put a finished folder in its place; another task of this node may have been faster."""
    try:
        fresh.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        stale = target.rename(target.with_name(f".{secrets.token_hex(8)}"))
        shutil.rmtree(stale, ignore_errors=True)
        fresh.rename(target)


def _archive(folder: Path) -> bytes:
    """A compressed archive that depends on names and contents alone."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
        for path in _files(folder):
            entry = archive.gettarinfo(path, arcname=path.relative_to(folder).as_posix())
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, os.getuid(), os.getgid(), "", ""
            with path.open("rb") as content:
                archive.addfile(entry, content)
    return stream.getvalue()


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
