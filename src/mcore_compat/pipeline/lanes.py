"""Lanes: how a cell gets its environment, and how a person runs one of its checks again.

The index lane installs from the package index with uv. The image lane takes the host as it is: its interpreter,
its torch, triton and numpy, with the wheels of an offline bundle on top.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from filelock import FileLock, Timeout

from mcore_compat.errors import LockTimeoutError, UsageError
from mcore_compat.matrix.cells import Cell, ReasonedRequirement
from mcore_compat.project import Project
from mcore_compat.provision.host_image import Image, image_cell, link_farm, provision_in_image, read_image
from mcore_compat.provision.package import build_package, harness_wheel, suite_requirements
from mcore_compat.provision.project_wheel import build_offline, build_wheel
from mcore_compat.provision.uv import Uv
from mcore_compat.provision.uv_environment import provision
from mcore_compat.provision.wheelhouse import Wheelhouse, peer_wheel
from mcore_compat.records import Package, ProjectWheel, Provisioned
from mcore_compat.results import Finding
from mcore_compat.subjects.selection import OURS, ChosenSubject
from mcore_compat.verdicts import Verdict

__all__ = ["ImageLane", "IndexLane", "Lane", "PortableLane"]

_LOCK_POLL_S = 0.5
_LOCK_LIMIT_S = 1800


class Lane(Protocol):
    """How cells get their environments."""

    @property
    def wheel(self) -> ProjectWheel:
        """The wheel of this project, which goes into every cell: the library, and the plugin of the harness."""

    @property
    def package(self) -> Package | None:
        """The package of another project, which goes into every cell too; None: there is none."""

    @property
    def environments(self) -> Path:
        """Folder with one folder per cell: ``venv``, ``home``, ``lock.txt``."""

    @property
    def roots(self) -> Mapping[str, Path]:
        """Folders of this lane that reports name by a word in place of their path."""

    def adapted(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """The cells as this lane runs them. Raises a typed error if it cannot run one of them."""

    def hold(self, cell: Cell, cancel: threading.Event, say: Callable[[str], None]) -> AbstractContextManager[bool]:
        """Keep other runs away from the cell's environment; False: the run was cancelled while waiting."""

    def provision(self, cell: Cell) -> Provisioned:
        """Make or reuse the cell's environment and verify it. Never raises for a fault of the cell."""

    def rerun(self, cell: Cell, check: str) -> str:
        """A sentence with the command that runs this check of this cell again."""

    def host_findings(self) -> tuple[Finding, ...]:
        """What there is to say about the host at the end of the run."""


@runtime_checkable
class PortableLane(Lane, Protocol):
    """A lane that a node of a cluster can open again."""

    @property
    def shipped(self) -> Mapping[str, Path]:
        """Folders that a node needs, by name."""

    def portable(self) -> PortableLane:
        """This lane without what belongs to this machine; it can be pickled."""

    def on_node(
        self, project: Project, wheel: ProjectWheel, host: Mapping[str, str], folders: Mapping[str, Path], work: Path
    ) -> Lane:
        """This lane on a node.

        Args:
            project: with the node's folders.
            wheel: with its path on the node.
            host: the node's environment variables.
            folders: those of ``shipped``, on the node.
            work: a folder that is removed after the cell.

        Raises:
            InfrastructureError: the node lacks a tool.
        """


@dataclass(frozen=True)
class IndexLane:
    """Environments from the package index, made by uv and kept between runs.

    Attributes:
        project: paths of the project.
        requirements: what every cell's suite needs.
        uv: the installer.
        host: the caller's environment variables.
        wheel: see :class:`Lane`.
        subject: what is judged, for the rerun command.
        package: see :class:`Lane`.
        caller: the project as the caller's machine has it, for the rerun command; None: it is ``project``.
        peer: what an installer is asked for to get the published subject, without its dependencies; "": none.
    """

    project: Project
    requirements: tuple[str, ...]
    uv: Uv
    wheel: ProjectWheel
    host: Mapping[str, str]
    subject: ChosenSubject = OURS
    package: Package | None = None
    caller: Project | None = None
    peer: str = ""

    @classmethod
    def open(
        cls, project: Project, requirements: tuple[str, ...], host: Mapping[str, str], subject: ChosenSubject = OURS
    ) -> IndexLane:
        """Find uv and build the project's wheel; for another project, its package beside the harness's own wheel.

        Raises:
            UsageError: another project asks for an extra or a folder that is not there.
            InfrastructureError: there is no uv, or a wheel does not build.
        """
        store = project.cells / ".subject"
        if not project.is_adopter:
            uv = Uv.find(host)
            wheel = build_wheel(project.root, store, uv)
            return cls(project, requirements, uv, wheel, host, subject, peer=_peer_source(subject, store, uv))
        if project.wheelhouse is not None and not project.wheelhouse.is_dir():
            raise UsageError(f"There is no wheelhouse {project.settings.wheelhouse}.", "Correct `wheelhouse`.")
        wheel = harness_wheel(store, Uv.find(host))
        uv = Uv.find(host, project.wheelhouse)
        settings = project.settings
        package = (
            build_package(project.root, store, uv, extras=settings.extras, editable=settings.editable)
            if project.package is not None
            else None
        )
        needs = tuple(dict.fromkeys((*requirements, *suite_requirements())))
        return cls(project, needs, uv, wheel, host, subject, package)

    @property
    def environments(self) -> Path:
        """See :class:`Lane`."""
        return self.project.cells

    @property
    def roots(self) -> Mapping[str, Path]:
        """See :class:`Lane`."""
        return {"cells": self.project.cells}

    def adapted(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """The cells as they are, once their interpreters are known to exist."""
        for python in sorted({cell.python for cell in cells}):
            self.uv.interpreter(python)
        if not self.peer:
            return tuple(cells)
        wanted = ReasonedRequirement(spec=self.peer, reason="the subject, without what it would bring along")
        return tuple(
            cell.model_copy(update={"without_dependencies": (*cell.without_dependencies, wanted)}) for cell in cells
        )

    @contextlib.contextmanager
    def hold(self, cell: Cell, cancel: threading.Event, say: Callable[[str], None]) -> Iterator[bool]:
        """Lock the cell's folder; says so when another run has it, and gives up when the run is cancelled.

        Raises:
            LockTimeoutError: another run keeps the environment for too long.
        """
        self.project.cells.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.project.cells / f"{cell.id}.lock")
        waited = 0.0
        while not cancel.is_set():
            try:
                lock.acquire(timeout=_LOCK_POLL_S)
                break
            except Timeout:
                if waited == 0.0:
                    say("waiting: another run is using this cell's environment")
                waited += _LOCK_POLL_S
                if waited >= _LOCK_LIMIT_S:
                    raise LockTimeoutError(
                        f"Another run has been using this cell's environment for {_LOCK_LIMIT_S} s.",
                        "Wait for it, or give this run another --cells-dir.",
                    ) from None
        try:
            yield lock.is_locked and not cancel.is_set()
        finally:
            lock.release()

    def provision(self, cell: Cell) -> Provisioned:
        """See :class:`Lane`."""
        return provision(
            cell,
            self.requirements,
            self.wheel,
            self.project.cells,
            self.uv,
            self.uv.interpreter(cell.python),
            self.host,
            self.package,
        )

    def rerun(self, cell: Cell, check: str) -> str:
        """The cell's own interpreter on the check, from the project's root; else the settings' sentence."""
        project = self.caller or self.project
        python = f"{_below(project.cells, project.root)}/{cell.id}/venv/bin/python"
        if project.settings.rerun is not None:
            return project.settings.rerun.format(cell=cell.id, check=check, python=python)
        variables = {variable.name: variable.value for variable in cell.env}
        if not self.subject.is_ours and self.subject.is_fused:
            variables["MCORE_COMPAT_SUBJECT"] = self.subject.variable.removeprefix(f"{project.root}{os.sep}")
        words = [f"{name}={value}" for name, value in variables.items()]
        words += [python, "-m", "pytest"]
        words += ["-p", "no:cacheprovider", f"{_below(project.suite, project.root)}/{check}"]
        return f"Run it again: `{' '.join(words)}`."

    def host_findings(self) -> tuple[Finding, ...]:
        """Nothing: this lane does not depend on what the host has installed."""
        return ()

    @property
    def shipped(self) -> Mapping[str, Path]:
        """The wheel of the project's own package, and the folders of wheels that it needs; the index has the rest."""
        if self.package is None:
            return {}
        links = {f"links-{number}": folder for number, folder in enumerate(self.package.links)}
        return {"package": self.package.wheel.wheel.parent, **links}

    def portable(self) -> IndexLane:
        """See :class:`PortableLane`.

        Raises:
            UsageError: the project's package is installed editable, from a folder of this machine.
        """
        if self.package is not None and self.package.source is not None:
            raise UsageError(
                f"{self.package.wheel.name} is installed editable, from a folder of this machine.",
                "Install its wheel, or run with --executor local.",
            )
        return replace(self, host={}, caller=self.caller or self.project)

    def on_node(
        self, project: Project, wheel: ProjectWheel, host: Mapping[str, str], folders: Mapping[str, Path], work: Path
    ) -> IndexLane:
        """With the node's uv, and environments that the node keeps."""
        del work
        package = self.package
        if package is not None:
            own = replace(package.wheel, wheel=folders["package"] / package.wheel.wheel.name)
            links = tuple(folders[f"links-{number}"] for number in range(len(package.links)))
            package = replace(package, wheel=own, links=links)
        return replace(self, project=project, wheel=wheel, host=host, uv=Uv.find(host), package=package)


@dataclass(frozen=True)
class ImageLane:
    """Environments on top of the host's own interpreter and torch, made from a bundle for this run only.

    Attributes:
        image: the host.
        house: the bundle.
        farm: folder of links to what the host gives to every cell.
        work: folder of the environments; removed after the run.
        variables: passed to the suite of every cell.
        limit_s: time limit of a cell's suite in seconds.
    """

    project: Project
    image: Image
    house: Wheelhouse
    farm: Path
    wheel: ProjectWheel
    work: Path
    host: Mapping[str, str]
    subject: ChosenSubject = OURS
    variables: Mapping[str, str] = field(default_factory=dict)
    limit_s: int = 420

    @classmethod
    def open(
        cls,
        project: Project,
        house: Wheelhouse,
        work: Path,
        host: Mapping[str, str],
        *,
        subject: ChosenSubject = OURS,
        variables: Mapping[str, str] | None = None,
        limit_s: int = 420,
        commit: str | None = None,
    ) -> ImageLane:
        """Look at the host and build the project's wheel without a network.

        Raises:
            InfrastructureError: the host has no torch, the bundle lacks the subject, or the wheel does not build.
        """
        image = read_image()
        wheel = build_offline(project.root, work / "subject", commit)
        if subject.peer is not None:
            peer_wheel(house.folder, subject.peer)  # reported before any cell is made
        farm = link_farm(image, house, work / "image", subject.peer)
        return cls(project, image, house, farm, wheel, work, host, subject, dict(variables or {}), limit_s)

    @property
    def package(self) -> None:
        """See :class:`Lane`; this lane judges this project alone."""

    @property
    def environments(self) -> Path:
        """See :class:`Lane`."""
        return self.work / "cells"

    @property
    def roots(self) -> Mapping[str, Path]:
        """See :class:`Lane`."""
        return {"cells": self.environments, "image": self.work / "image", "python": Path(sys.prefix)}

    def adapted(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """The cells with the host's torch, on the GPU lane."""
        return tuple(
            image_cell(cell, self.image, self.house, self.host, {**self.variables, **self.gpu_of(place)}, self.limit_s)
            for place, cell in enumerate(cells)
        )

    def gpu_of(self, place: int) -> dict[str, str]:
        """Variables of one cell: cells of one rank take turns on the GPUs, unless the caller chose the GPUs."""
        several = "MCORE_COMPAT_NPROC" in self.variables
        if several or len(self.image.gpus) < 2 or "CUDA_VISIBLE_DEVICES" in self.host:
            return {}
        return {"CUDA_VISIBLE_DEVICES": str(place % len(self.image.gpus))}

    def hold(self, cell: Cell, cancel: threading.Event, say: Callable[[str], None]) -> AbstractContextManager[bool]:
        """Nothing to keep away: the environments belong to this run."""
        del cell, say
        return contextlib.nullcontext(not cancel.is_set())

    def provision(self, cell: Cell) -> Provisioned:
        """See :class:`Lane`."""
        return provision_in_image(
            cell, self.house, self.farm, self.wheel, self.environments, self.host, self.subject.peer
        )

    def rerun(self, cell: Cell, check: str) -> str:
        """The lane's own command: its environments are gone when somebody reads the report."""
        del check
        options = f"--select {cell.id}" + ("" if self.subject.is_ours else f" --subject {self.subject.name}")
        # A gate's side that is not a cell of the matrix cannot be selected.
        how = "the same command" if cell.id in {"baseline", "candidate"} else f"`ci/gpu {options}`"
        return f"Run it again with {how}; its log is cells/{cell.id}/output.log in the run's folder."

    def host_findings(self) -> tuple[Finding, ...]:
        """The host that the report is about, and what the run did to its torch, triton and numpy: nothing."""
        after = read_image(self.image.sites)
        seen = Finding(kind="image", message=f"Host: {self.image}", next_step="")
        if after.digest == self.image.digest:
            return (
                seen,
                Finding(kind="image-unchanged", message="torch, triton and numpy of the host are unchanged"),
            )
        return (
            seen,
            Finding(
                kind="image-changed",
                message=f"torch, triton or numpy of the host changed during the run: {self.image} became {after}",
                next_step="Find out what wrote to the image; no result of this run can be trusted.",
                verdict=Verdict.INFRA,
            ),
        )

    @property
    def shipped(self) -> Mapping[str, Path]:
        """The bundle."""
        return {"bundle": self.house.folder}

    def portable(self) -> ImageLane:
        """See :class:`PortableLane`."""
        return replace(self, host={})

    def on_node(
        self, project: Project, wheel: ProjectWheel, host: Mapping[str, str], folders: Mapping[str, Path], work: Path
    ) -> ImageLane:
        """With the node's own image, and environments for this cell alone."""
        image = read_image()
        house = replace(self.house, folder=folders["bundle"])
        house.check_host(platform.machine())
        farm = link_farm(image, house, work / "image", self.subject.peer)
        return replace(self, project=project, image=image, house=house, farm=farm, wheel=wheel, work=work, host=host)


def _peer_source(subject: ChosenSubject, store: Path, uv: Uv) -> str:
    """What an installer is asked for to get a published subject in CPU cells; a checkout is built first."""
    peer = subject.peer
    if peer is None or peer.checkout is None:
        return peer.source if peer is not None else ""
    wheel = build_wheel(peer.checkout, store, uv, whose=f"The checkout of {peer.distribution}")
    return f"{peer.distribution} @ {wheel.wheel.as_uri()}"


def _below(path: Path, root: Path) -> str:
    """The path as somebody in ``root`` types it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
