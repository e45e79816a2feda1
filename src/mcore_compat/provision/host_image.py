"""The GPU host as it is: its interpreter, its torch, triton and numpy, its GPUs; and cells' environments on top of it.

An environment here is a bare ``venv`` folder with the bundle's wheels in its own site-packages, and behind them, on
the same path, a folder of links to what the image holds. megatron-core and whatever the bundle brings are left out of
the links, so that an image that has its own cannot be mistaken for the cell's. Nothing of the image is written to.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mcore_compat.errors import InfrastructureError
from mcore_compat.matrix.cells import Cell, ReasonedVariable
from mcore_compat.provision import probe
from mcore_compat.provision.bundle import IMAGE_PACKAGES
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.provision.process import run_logged
from mcore_compat.provision.verify import problems
from mcore_compat.provision.wheelhouse import Wheelhouse, WheelhouseError, distribution_name, peer_wheel, unpack
from mcore_compat.records import Environment, EnvironmentFacts, ProjectWheel, Provisioned
from mcore_compat.subjects.published import Peer
from mcore_compat.verdicts import Verdict

__all__ = ["Image", "image_cell", "link_farm", "provision_in_image", "read_image"]

_PROBE_LIMIT_S = 300
# How NCCL, torch and NVSHMEM use the links between GPUs is the host's decision, whatever it is.
_HOST_DECIDES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
_NOT_LINKED = ("megatron", "sitecustomize.py", "usercustomize.py", "__pycache__")


@dataclass(frozen=True)
class Image:
    """What the host gives to every cell.

    Attributes:
        sites: its package folders, in the order of its path.
        versions: of torch, triton and numpy, by name.
        digest: over name, size and time of every file of these three; equal digests: nobody touched them.
        gpus: ``name, driver`` of each GPU, in the host's own words.
    """

    sites: tuple[Path, ...]
    versions: Mapping[str, str]
    digest: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        cards = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        held = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{cards}; Python {platform.python_version()}, {held}"


def read_image(sites: Sequence[Path] | None = None) -> Image:
    """Look at the host.

    Args:
        sites: its package folders; those of this interpreter where None.

    Raises:
        InfrastructureError: torch, triton or numpy is not there.
    """
    folders = tuple(sites) if sites is not None else _own_sites()
    versions: dict[str, str] = {}
    total = hashlib.sha256()
    for name in IMAGE_PACKAGES:
        found = next(iter(importlib.metadata.distributions(name=name, path=[str(folder) for folder in folders])), None)
        if found is None:
            raise InfrastructureError(
                f"This interpreter ({Path(sys.executable).name}) has no {name}.",
                "Run with the image's own Python, the one that has torch; or run the CPU lane: `nox -s compat`.",
            )
        versions[name] = found.version
        total.update(f"{name}=={found.version}\n".encode())
        for entry in sorted(found.files or (), key=str):
            if "__pycache__" in entry.parts:
                continue
            path = Path(str(entry.locate()))
            state = path.stat() if path.exists() else None
            total.update(f"{entry}:{(state.st_size, state.st_mtime_ns) if state else 'gone'}\n".encode())
    return Image(folders, versions, total.hexdigest(), _gpus())


def image_cell(
    cell: Cell, image: Image, house: Wheelhouse, host: Mapping[str, str], extra: Mapping[str, str], limit_s: int
) -> Cell:
    """The cell as it is on this host: the image's torch, the GPU lane, no constraints on what the image decides.

    Args:
        cell: as the matrix has it.
        image: the host.
        house: the bundle; of pytest's plugins only its own are loaded.
        host: the caller's environment.
        extra: variables for the suite.
        limit_s: the cell's time limit.
    """
    passed = {name: host[name] for name in _HOST_DECIDES if name in host}
    passed["MCORE_COMPAT_IMAGE"] = os.pathsep.join(str(site) for site in image.sites)
    passed["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    passed["PYTEST_PLUGINS"] = _pytest_plugins(house)
    variables = tuple(
        ReasonedVariable(name=name, value=value, reason="set by the GPU lane for this host")
        for name, value in {**passed, **extra}.items()
    )
    return cell.model_copy(
        update={
            "torch": image.versions["torch"],
            "lane": "gpu",
            "constraints": (),
            "env": (*cell.env, *variables),
            "time_limit_s": limit_s,
        }
    )


def link_farm(image: Image, house: Wheelhouse, folder: Path, peer: Peer | None = None) -> Path:
    """A folder of links to everything in the image that no cell may get elsewhere.

    Left out are megatron-core, this project, the package under test, and the metadata of what the bundle brings; the
    modules of the latter are found in the cell first.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    brought = {"megatron-core", "mcore-compat", *(distribution_name(wheel.filename) for wheel in house.suite)}
    own = {peer.distribution} if peer is not None else set()
    brought |= own
    hidden = {*_NOT_LINKED, *own}
    for site in image.sites:
        for entry in sorted(site.iterdir()):
            metadata = entry.suffix in {".dist-info", ".egg-info"}
            if metadata and distribution_name(entry.name) in brought:
                continue
            if entry.name in hidden or entry.suffix in {".pth", ".egg-link"} or (folder / entry.name).is_symlink():
                continue
            (folder / entry.name).symlink_to(entry)
    return folder


def provision_in_image(
    cell: Cell,
    house: Wheelhouse,
    farm: Path,
    subject: ProjectWheel,
    cells: Path,
    host: Mapping[str, str],
    peer: Peer | None = None,
) -> Provisioned:
    """Make the environment of ``cell`` below ``cells`` and verify it; every time, since it costs a second.

    With ``peer`` it has the published package under test too, as in its wheel.
    """
    started = time.monotonic()

    def refused(verdict: Verdict, reason: str, next_step: str) -> Provisioned:
        return Provisioned(time.monotonic() - started, None, verdict, reason, next_step)

    wheels = house.cells.get(cell.megatron_requirement)
    if wheels is None:
        return refused(
            Verdict.UNRESOLVABLE, f"the bundle has no {cell.megatron_requirement}", "Make it again with `ci/bundle`."
        )
    folder = cells / cell.id
    try:
        site = _bare_environment(folder)
        house.unpack((*house.suite, *wheels), site)
        unpack(subject.wheel, site)
        if peer is not None:
            unpack(peer_wheel(house.folder, peer), site)
        (site / "mcore_compat_image.pth").write_text(f"{farm}\n", encoding="utf-8")
        lock = "".join(f"{w.filename} --hash=sha256:{w.sha256}\n" for w in (*wheels, *house.suite))
        lock += f"{peer.filename} --hash=sha256:{peer.sha256}\n" if peer is not None else ""
        (folder / "lock.txt").write_text(lock, encoding="utf-8")
        facts = _probed(cell, folder, host)
    except WheelhouseError as exc:
        return refused(Verdict.INFRA, exc.problem, exc.next_step)
    except OSError as exc:
        return refused(
            Verdict.INFRA, f"the environment could not be made: {exc.strerror} ({exc.filename})", "Look at the disk."
        )
    if isinstance(facts, str):
        return refused(Verdict.INFRA, facts, "Give the cell the requirement or the variable that this release needs.")
    wrong = problems(cell, facts, {}, subject.version)
    if peer is not None and facts.version(peer.distribution) != peer.version:
        wrong += (f"{peer.distribution} is {facts.version(peer.distribution) or 'not there'}, not {peer.version}",)
    if wrong:
        return refused(
            Verdict.INFRA,
            "the environment is not the one asked for: " + "; ".join(wrong),
            "Correct the cell's recipe, or the image.",
        )
    return Provisioned(time.monotonic() - started, Environment(folder, facts, lock, reused=False))


def _bare_environment(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "home").mkdir(parents=True)
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder / "venv")
    (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    return site


def _probed(cell: Cell, folder: Path, host: Mapping[str, str]) -> EnvironmentFacts | str:
    """The probe's facts, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="mcore-compat-probe-") as scratch:
        empty = Path(scratch, "empty")
        empty.mkdir()
        done = run_logged(
            [folder / "venv" / "bin" / "python", "-I", "-B", probe.__file__, "--import"],
            cwd=empty,
            env=cell_environment(host, cell, home=folder / "home", temporary=empty),
            log=Path(scratch, "output.log"),
            limit_s=_PROBE_LIMIT_S,
            cancel=threading.Event(),
        )
    if done.timed_out:
        return f"the proof did not end within {_PROBE_LIMIT_S} s"
    lines = [line for line in done.output.splitlines() if line.strip()]
    if done.returncode != 0:
        return f"`import {probe.DEEP_MODULE}` fails in the new environment: {lines[-1] if lines else 'no output'}"
    try:
        return EnvironmentFacts.model_validate_json(next(line for line in reversed(lines) if line.startswith("{")))
    except (ValidationError, StopIteration):
        return "the proof's output cannot be read"


def _own_sites() -> tuple[Path, ...]:
    """The package folders of this interpreter; not those that the caller's variables add, nor the user's own."""
    code = "import sys; print('\\n'.join(sys.path))"
    listed = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line]
    return tuple(path for path in paths if path.name in {"site-packages", "dist-packages"} and path.is_dir())


def _gpus() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    return tuple(line.replace(", ", ", driver ", 1) for line in lines)


def _pytest_plugins(house: Wheelhouse) -> str:
    """The plugins that the suite's own wheels bring; those of the image were made for another suite."""
    modules: list[str] = []
    for wheel in house.suite:
        with zipfile.ZipFile(house.folder / wheel.filename) as archive:
            names = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
            parser = configparser.ConfigParser(delimiters=("=",))
            parser.read_string(archive.read(names[0]).decode("utf-8") if names else "")
        if parser.has_section("pytest11"):
            modules += parser["pytest11"].values()
    return ",".join(sorted(modules))
