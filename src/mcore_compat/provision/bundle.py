"""Makes the offline bundle: every cell's megatron-core and what the harness and the suite need, as hashed wheels.

torch, triton and numpy are the GPU host's own and are never in it. Releases without a wheel for the interpreter are
built here from their published source, where a compiler and a network are.
"""

from __future__ import annotations

import platform
import re
import shutil
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mcore_compat.errors import InfrastructureError, UsageError
from mcore_compat.matrix.cells import Cell
from mcore_compat.provision.uv import Uv, UvFailure
from mcore_compat.provision.wheelhouse import Wheel, Wheelhouse, WheelhouseError, distribution_name, peer_wheel
from mcore_compat.subjects.published import PEERS_FOLDER, Peer

__all__ = ["IMAGE_PACKAGES", "LIMIT_BYTES", "fetch_peer", "make_bundle", "unmet"]

# Never carried and never installed: they are what a GPU host is.
IMAGE_PACKAGES = ("torch", "triton", "numpy")
# The GPU lane makes its environments without an installer.
_NOT_CARRIED = ("uv",)
LIMIT_BYTES = 60 << 20
_PIP = ("tool", "run", "-q", "--from", "pip>=26")


def make_bundle(root: Path, folder: Path, cells: Sequence[Cell], common: Sequence[str], uv: Uv) -> Wheelhouse:
    """Fill ``folder`` with the wheels of ``cells``, and write its manifest. Wheels that are there already are kept.

    Args:
        root: the project's root, for what its harness needs.
        folder: where the bundle goes.
        cells: the cells; all of one interpreter.
        common: what every cell's suite needs.
        uv: resolves, downloads and builds.

    Raises:
        UsageError: the cells need more than one interpreter.
        InfrastructureError: something cannot be resolved, downloaded or built.
    """
    pythons = sorted({cell.python for cell in cells})
    if len(pythons) != 1:
        raise UsageError(f"The cells need Python {', '.join(pythons)}.", "Make one bundle for each, with --select.")
    folder.mkdir(parents=True, exist_ok=True)
    maker = _Maker(folder, uv, pythons[0])
    (folder / "manifest.json").unlink(missing_ok=True)
    harness = maker.needs(_harness_requirements(root))
    suite = maker.needs(common)
    by_cell: dict[str, tuple[Wheel, ...]] = {}
    for cell in cells:
        if cell.megatron_requirement not in by_cell:
            extra = maker.needs([item.spec for item in cell.requirements]) if cell.requirements else ()
            by_cell[cell.megatron_requirement] = (maker.megatron(cell), *extra)
    house = Wheelhouse(folder, pythons[0], platform.machine(), harness, suite, by_cell)
    kept = {wheel.filename for wheel in house.wheels}
    for stale in (path for path in folder.glob("*.whl") if path.name not in kept):
        stale.unlink()
    house.write()
    return house


def fetch_peer(folder: Path, peer: Peer, python: str, uv: Uv) -> Path:
    """The wheel of another project's package in ``folder/peers``, without its dependencies; kept if its hash is right.

    Raises:
        InfrastructureError: it cannot be downloaded, or is not the file whose hash is pinned.
    """
    try:
        return peer_wheel(folder, peer)
    except WheelhouseError:
        target = folder / PEERS_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    (target / peer.filename).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="mcore-compat-bundle-") as scratch:
        lock = Path(scratch, "lock.txt")
        lock.write_text(f"{peer.requirement}\n", encoding="utf-8")
        _Maker(folder, uv, python).download(lock, target)
    return peer_wheel(folder, peer)


class _Maker:
    """Fetches and builds into one folder, each file once."""

    def __init__(self, folder: Path, uv: Uv, python: str) -> None:
        self._folder = folder
        self._uv = uv
        self._python = python

    def needs(self, requirements: Iterable[str]) -> tuple[Wheel, ...]:
        """The wheels of these requirements and of theirs, without what is the image's."""
        wanted = sorted(set(requirements))
        if not wanted:
            return ()
        with tempfile.TemporaryDirectory(prefix="mcore-compat-bundle-") as scratch:
            lock = self._lock(Path(scratch), wanted, deep=True)
            files = Path(scratch, "files")
            self.download(lock, files)
            return tuple(self._take(path, "index") for path in sorted(files.glob("*.whl")))

    def download(self, lock: Path, target: Path) -> None:
        """The very wheels that a lock names, by their hashes."""
        self._pip("download", lock, target, "--only-binary", ":all:")

    def megatron(self, cell: Cell) -> Wheel:
        """megatron-core's wheel for a cell: as published, else built."""
        present = self._present(cell)
        if present is not None:
            return present
        built = cell.builds_megatron
        with tempfile.TemporaryDirectory(prefix="mcore-compat-bundle-") as scratch:
            files = Path(scratch, "files")
            if cell.source is not None:
                self._call([*_PIP, "-p", self._python, "pip", "wheel", "-q", "--no-deps", "-w", files, cell.source])
            else:
                lock = self._lock(Path(scratch), [cell.megatron_requirement], deep=False)
                how = ("--no-binary", "megatron-core") if built else ("--only-binary", ":all:")
                self._pip("wheel" if built else "download", lock, files, *how)
            (wheel,) = files.glob("megatron_core-*.whl")
            return self._take(wheel, "built" if built else "index")

    def _present(self, cell: Cell) -> Wheel | None:
        """A release that an earlier bundle fetched or built; a file from elsewhere may have changed since."""
        if cell.source is not None:
            return None
        tag = f"cp{self._python.replace('.', '')}"
        found = sorted(self._folder.glob(f"megatron_core-{cell.megatron_core}-{tag}-*.whl"))
        return Wheel.of(found[0], "built" if cell.builds_megatron else "index") if found else None

    def _lock(self, scratch: Path, requirements: Sequence[str], *, deep: bool) -> Path:
        source, lock = scratch / "requirements.in", scratch / "lock.txt"
        source.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        self._call(
            [
                *("pip", "compile", "-q", "--no-header", "--no-annotate", "--generate-hashes"),
                *("--python-version", self._python, "-o", lock),
                *([] if deep else ["--no-deps"]),
                *(part for name in IMAGE_PACKAGES for part in ("--no-emit-package", name)),
                source,
            ]
        )
        return lock

    def _pip(self, verb: str, lock: Path, target: Path, *how: str) -> None:
        self._call(
            [
                *(*_PIP, "-p", self._python, "pip", verb, "-q", "--no-deps", "--require-hashes", *how),
                *("-r", lock, "-d" if verb == "download" else "-w", target),
            ]
        )

    def _take(self, path: Path, origin: str) -> Wheel:
        if distribution_name(path.name) in IMAGE_PACKAGES:
            raise InfrastructureError(f"{path.name} is the image's.", "Find out what asks for it, and leave that out.")
        target = self._folder / path.name
        if not target.is_file() or Wheel.of(target, origin) != Wheel.of(path, origin):
            shutil.copyfile(path, target)
        return Wheel.of(target, origin)

    def _call(self, arguments: Sequence[str | Path]) -> None:
        try:
            self._uv.call(arguments)
        except UvFailure as exc:
            raise InfrastructureError(
                f"The bundle cannot be made: {exc.reason}.", "Check the network; a build needs a C++ compiler."
            ) from exc


def _harness_requirements(root: Path) -> list[str]:
    """What the harness needs on a GPU host: its own extra, and what builds the project's wheel."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    found = [*project["project"]["optional-dependencies"]["harness"], *project["build-system"]["requires"]]
    return [text for text in found if canonicalize_name(Requirement(text).name) not in _NOT_CARRIED]


def unmet(house: Wheelhouse, wheels: Sequence[Wheel]) -> tuple[str, ...]:
    """Requirements of ``wheels`` that neither they nor the image fulfil; the bundle's own check of itself."""
    names = {distribution_name(wheel.filename) for wheel in wheels} | set(IMAGE_PACKAGES)
    found = set()
    for wheel in wheels:
        for requirement in _requirements_of(house.folder / wheel.filename):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if canonicalize_name(requirement.name) not in names:
                found.add(f"{distribution_name(wheel.filename)} needs {requirement}")
    return tuple(sorted(found))


def _requirements_of(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    return [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
