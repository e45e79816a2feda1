"""The offline bundle on disk: one folder of wheels and a manifest that names and hashes each of them.

Standard library only: on a GPU host this runs before any of the harness's own needs is there.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from mcore_compat.errors import InfrastructureError
from mcore_compat.subjects.published import PEERS_FOLDER, Peer

__all__ = ["Wheel", "Wheelhouse", "WheelhouseError", "distribution_name", "peer_wheel", "unpack"]

_SCHEMA = 1


class WheelhouseError(InfrastructureError):
    """The bundle is missing, damaged, or made for another interpreter."""

    def __init__(self, problem: str, next_step: str = "Make it again with `ci/bundle`.") -> None:
        super().__init__(problem, next_step)


@dataclass(frozen=True)
class Wheel:
    """One wheel of the bundle.

    Attributes:
        filename: its name in the folder.
        sha256: of the file.
        size: in bytes.
        origin: ``index`` (as published, checked against the index's hash), ``built`` (from the published source,
            whose hash was checked) or ``given`` (by the caller, as it is).
    """

    filename: str
    sha256: str
    size: int
    origin: str

    @classmethod
    def of(cls, path: Path, origin: str) -> Wheel:
        """The entry of a file."""
        data = path.read_bytes()
        return cls(path.name, hashlib.sha256(data).hexdigest(), len(data), origin)


@dataclass(frozen=True)
class Wheelhouse:
    """The bundle.

    Attributes:
        folder: of the bundle.
        python: the interpreter it is for, major and minor.
        machine: the processor it is for, as ``platform.machine()`` says.
        harness: wheels that the harness itself needs.
        suite: wheels that the property suite needs, in every cell.
        cells: megatron-core's wheel and the cell's own further wheels, by what the cell asks the installer for.
        outside: by hash, the path of a wheel that is not in the folder; never written to the manifest.
    """

    folder: Path
    python: str
    machine: str
    harness: tuple[Wheel, ...]
    suite: tuple[Wheel, ...]
    cells: Mapping[str, tuple[Wheel, ...]]
    outside: Mapping[str, Path] = field(default_factory=dict)

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """All of them, each once."""
        every = [*self.harness, *self.suite, *(wheel for wheels in self.cells.values() for wheel in wheels)]
        return tuple({wheel.filename: wheel for wheel in every}.values())

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size for wheel in self.wheels)

    def write(self) -> Path:
        """Write ``manifest.json``; last, so that a folder without it is known to be unfinished."""
        content = {
            "schema_version": _SCHEMA,
            "python": self.python,
            "machine": self.machine,
            "harness": [asdict(wheel) for wheel in self.harness],
            "suite": [asdict(wheel) for wheel in self.suite],
            "cells": {name: [asdict(wheel) for wheel in wheels] for name, wheels in self.cells.items()},
        }
        temporary = self.folder / ".manifest.tmp"
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return temporary.replace(self.folder / "manifest.json")

    @classmethod
    def read(cls, folder: Path) -> Wheelhouse:
        """Read the manifest.

        Raises:
            WheelhouseError: there is none that can be read.
        """
        try:
            content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            return cls(
                folder=folder,
                python=content["python"],
                machine=content["machine"],
                harness=_wheels(content["harness"]),
                suite=_wheels(content["suite"]),
                cells={name: _wheels(wheels) for name, wheels in content["cells"].items()},
            )
        except FileNotFoundError as exc:
            raise WheelhouseError(f"There is no bundle at {folder.name}/.") from exc
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise WheelhouseError(f"{folder.name}/manifest.json cannot be read ({type(exc).__name__}).") from exc

    def check_host(self, machine: str) -> None:
        """Refuse another interpreter or processor than the bundle was made for.

        Raises:
            WheelhouseError: this one differs.
        """
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if here != self.python or machine != self.machine:
            raise WheelhouseError(
                f"The bundle is for Python {self.python} on {self.machine}, this is Python {here} on {machine}.",
                f"Run with a Python {self.python}, or make a bundle for this host.",
            )

    def including(self, requirement: str, path: Path, needs: Iterable[Wheel] = ()) -> Wheelhouse:
        """The same bundle and one more wheel from elsewhere.

        Args:
            requirement: what its cell asks the installer for.
            path: of the wheel.
            needs: wheels of the bundle that its cell needs as well.
        """
        wheel = Wheel.of(path, "given")
        cells = {**self.cells, requirement: (wheel, *needs)}
        return replace(self, cells=cells, outside={**self.outside, wheel.sha256: path})

    def unpack(self, wheels: Iterable[Wheel], site: Path) -> None:
        """Check the hash of each wheel and unpack it into ``site``.

        Raises:
            WheelhouseError: a wheel is missing or not the one that the manifest names.
        """
        site.mkdir(parents=True, exist_ok=True)
        for wheel in wheels:
            path = self.outside.get(wheel.sha256, self.folder / wheel.filename)
            if not path.is_file():
                raise WheelhouseError(f"{wheel.filename} is missing from the bundle.")
            if hashlib.sha256(path.read_bytes()).hexdigest() != wheel.sha256:
                raise WheelhouseError(f"{wheel.filename} is not the file that the manifest names.")
            unpack(path, site)


def unpack(wheel: Path, site: Path) -> None:
    """Put the files of a wheel into ``site``, as an installer does, but for scripts, which no cell calls.

    Raises:
        WheelhouseError: a member would lie outside of ``site``.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = PurePosixPath(member.filename).parts
            if not parts or ".." in parts or PurePosixPath(member.filename).is_absolute():
                raise WheelhouseError(f"{wheel.name} has a member outside of itself: {member.filename!r}.")
            if parts[0].endswith(".data"):
                if parts[1:2] not in (("purelib",), ("platlib",)):
                    continue
                parts = parts[2:]
            if member.is_dir() or not parts:
                continue
            target = site.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def distribution_name(filename: str) -> str:
    """The normalised distribution name in a wheel's file name."""
    return filename.split("-", 1)[0].lower().replace("_", "-").replace(".", "-")


def _wheels(entries: list[dict[str, object]]) -> tuple[Wheel, ...]:
    return tuple(
        Wheel(str(entry["filename"]), str(entry["sha256"]), int(str(entry["size"])), str(entry["origin"]))
        for entry in entries
    )


def peer_wheel(bundle: Path, peer: Peer) -> Path:
    """The wheel of a published subject in a bundle, its hash checked.

    Raises:
        WheelhouseError: it is missing, or another file has its name.
    """
    path = bundle / PEERS_FOLDER / peer.filename
    again = f"Make it again with `ci/bundle --subject {peer.distribution}`."
    if not path.is_file():
        raise WheelhouseError(f"The bundle has no {PEERS_FOLDER}/{peer.filename}.", again)
    if hashlib.sha256(path.read_bytes()).hexdigest() != peer.sha256:
        raise WheelhouseError(f"{PEERS_FOLDER}/{peer.filename} is not the {peer.distribution} that is judged.", again)
    return path
