"""The megatron-core of one interpreter, judged where it is: no environment is made and nothing is installed.

The interpreter is that of an image, a cluster's module or a development checkout; the harness may run in another one.
Its packages are used as they are. Only the harness's plugin is put on its path, from a folder that holds nothing else.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import Finding, FindingState, compare_contracts, expected_modes
from mcore_compat.contract.rules.rule import Rule
from mcore_compat.contract.source.tree import read_directory
from mcore_compat.errors import InfrastructureError
from mcore_compat.gate.cells import nearest_release
from mcore_compat.matrix.cells import PREDICTED, Cell, ReasonedVariable
from mcore_compat.provision import here_probe
from mcore_compat.provision.child_env import cell_environment
from mcore_compat.provision.process import run_logged
from mcore_compat.provision.verify import PYTEST_PLUGINS
from mcore_compat.records import Environment, EnvironmentFacts, Imported
from mcore_compat.run.variables import ROOTS

__all__ = [
    "Found",
    "Here",
    "LocalEdit",
    "cell_of_here",
    "environment_of_here",
    "judged_as",
    "look_here",
    "nearest_to",
    "plugin_folder",
]

_PROBE_LIMIT_S = 900
_PACKAGES = ("mcore_compat", "mcore_fused")
# What a launcher, NCCL, CUDA and Transformer Engine read; nothing else of the caller reaches the suite.
_PASSED = (
    "CUDA_", "GLOO_", "GROUP_", "HYDRA_", "LOCAL_", "MASTER_", "NCCL_", "NVTE_", "OMPI_", "PMI", "SLURM_", "TORCH",
    "UCX_",
)  # fmt: skip
_PASSED_NAMES = frozenset({"LD_LIBRARY_PATH", "PYTHONPATH", "RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE"})
# A cell with a source is not compared with the release of its label; this one is never installed.
_NOT_INSTALLED = "megatron-core @ file:///here"
_TOOLS = ("pytest", *PYTEST_PLUGINS)


class Here(BaseModel):
    """What the probe found.

    Attributes:
        python: version of the interpreter.
        prefix: its prefix.
        path: its module path.
        megatron: roots of the package ``megatron``.
        distributions: versions by distribution.
        missing: modules that a suite's pytest needs and that are not there.
        changed: files of megatron-core that differ from what was installed.
        error: why megatron.core cannot be imported; empty: it can.
        attribute: what megatron.core says of its version.
        origin: of megatron.core, below the prefix if it is there.
        source: the folder that has ``megatron/core``.
        gpus: how many torch sees.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    python: str
    prefix: str
    path: tuple[str, ...]
    megatron: tuple[str, ...]
    distributions: dict[str, str]
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    error: str = ""
    attribute: str | None = None
    origin: str | None = None
    source: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class LocalEdit:
    """One item of the contract that reads otherwise than in the nearest release.

    Attributes:
        symbol: the item's id.
        where: file and line, as the source has it.
        kind: ``added``, ``removed`` or ``changed``.
        level: of the rule that it breaks; "" if no rule speaks of it.
        message: the rule's sentence.
    """

    symbol: str
    where: str
    kind: str
    level: str = ""
    message: str = ""


@dataclass(frozen=True)
class Found:
    """The release that this megatron-core is nearest to, and what is different here."""

    contract: Contract
    nearest: str
    edits: tuple[LocalEdit, ...]


def plugin_folder(folder: Path, package: Path | None = None) -> Path:
    """A folder with links to this project's packages alone, for the path of another interpreter.

    Args:
        folder: where it is made.
        package: the folder of ``mcore_compat``; None: the one that runs.
    """
    home = (package or Path(__file__).parents[1]).resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in _PACKAGES:
        if (home / name).is_dir():
            (folder / name).symlink_to(home / name)
    return folder


def look_here(python: Path, cell: Cell, home: Path, host: Mapping[str, str]) -> Here:
    """Ask an interpreter what it has.

    Args:
        python: the interpreter.
        cell: its variables are those of the suite.
        home: the home folder of the processes.
        host: the caller's environment variables.

    Raises:
        InfrastructureError: it does not run, has no megatron-core or cannot import it, or lacks pytest.
    """
    with tempfile.TemporaryDirectory(prefix="mcore-compat-here-") as scratch:
        empty = Path(scratch, "empty")
        empty.mkdir()
        done = run_logged(
            [python, "-B", here_probe.__file__, *_TOOLS],
            cwd=empty,
            env=cell_environment(host, cell, home=home, temporary=empty),
            log=Path(scratch, "output.log"),
            limit_s=_PROBE_LIMIT_S,
            cancel=threading.Event(),
        )
    line = next((line for line in reversed(done.output.splitlines()) if line.startswith("{")), "")
    try:
        here = Here.model_validate_json(line)
    except ValidationError as exc:
        last = (done.output.strip().splitlines() or ["no output"])[-1]
        raise InfrastructureError(
            f"The interpreter {python.name} cannot be asked: {last}.", "Name one of Python 3.10 or later with --python."
        ) from exc
    if not here.megatron:
        raise InfrastructureError(
            "This interpreter has no megatron-core.", "Name the one that has it with --python, or set PYTHONPATH."
        )
    if here.error:
        raise InfrastructureError(
            f"megatron.core cannot be imported here: {here.error.splitlines()[0]}.", "Mend the image or its variables."
        )
    if here.missing:
        packages = "pytest pytest-reportlog pytest-timeout pytest-xdist hypothesis"
        raise InfrastructureError(
            f"This interpreter has no {', '.join(here.missing)}.",
            f"Bring it: `pip install --target tools {packages}`, and name the folder with --tools.",
        )
    return here


def nearest_to(source: Path, snapshots: Mapping[str, Contract], rules: tuple[Rule, ...]) -> Found:
    """Read the source and find the nearest release and the local edits of what matters to a patch.

    Args:
        source: the folder that has ``megatron/core``.
        snapshots: contracts of the releases.
        rules: say how much an edit counts.

    Raises:
        SourceError: it cannot be read.
    """
    contract = extract(read_directory(source), "here")
    nearest = nearest_release(contract, snapshots)
    release = snapshots[nearest]
    counted = {f.item: f for f in compare_contracts(release, contract, rules) if f.state is not FindingState.SAME}
    changed = [i for i in sorted(release.items.keys() | contract.items.keys()) if release.value(i) != contract.value(i)]
    return Found(contract, nearest, tuple(_edit(item, release, contract, counted.get(item)) for item in changed))


def _edit(item: str, release: Contract, here: Contract, finding: Finding | None) -> LocalEdit:
    before, after = release.value(item), here.value(item)
    kind = "added" if before is None else "removed" if after is None else "changed"
    place = here.items.get(item) or release.items.get(item)
    level, message = (finding.level, finding.text) if finding is not None else ("", "")
    return LocalEdit(item, place.where if place is not None else "", kind, level, message)


def cell_of_here(host: Mapping[str, str], plugin: Path, tools: Path | None, limit_s: int) -> Cell:
    """A cell that stands for this interpreter, before it is known what is in it.

    Args:
        host: the caller's environment variables.
        plugin: the folder of this project's packages.
        tools: a folder of further packages for pytest.
        limit_s: time limit of the suite in seconds.
    """
    passed = {name: value for name, value in host.items() if name in _PASSED_NAMES or name.startswith(_PASSED)}
    path = [str(plugin), passed.get("PYTHONPATH", ""), "" if tools is None else str(tools.resolve())]
    passed["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    variables = tuple(
        ReasonedVariable(name=name, value=value, reason="as the caller has set it")
        for name, value in sorted(passed.items())
        if name.isupper()
    )
    cell = Cell(
        id="here", megatron_core="0", source=_NOT_INSTALLED, python="3.12", torch="0", lane="cpu", time_limit_s=limit_s,
    )  # fmt: skip
    return cell.model_copy(update={"env": variables, "contract_class": "here"})


def environment_of_here(python: Path, here: Here, folder: Path) -> Environment:
    """The interpreter as a proved environment: what the suite's process must be seen to use."""
    binaries = folder / "venv" / "bin"
    binaries.mkdir(parents=True)
    (folder / "home").mkdir(exist_ok=True)
    launcher = binaries / "python"
    launcher.write_text(f"#!/bin/sh\nexec '{python}' \"$@\"\n", encoding="utf-8")
    launcher.chmod(0o755)
    facts = EnvironmentFacts(
        python=here.python,
        user_site=False,
        distributions={name: (version,) for name, version in here.distributions.items()},
        megatron_roots=here.megatron,
        megatron_files=None,
        subject_files=None,
        imported=Imported(
            modules=1, foreign={}, attribute=here.attribute, origin=here.origin or "", versions={}, seconds=0.0
        ),
    )
    return Environment(folder, facts, "", reused=True)


def judged_as(cell: Cell, here: Here, found: Found, *, fused: bool) -> Cell:
    """The cell of this interpreter, now that it is known: its own versions, and the nearest release's exceptions."""
    modes = expected_modes(found.contract)
    roots = ReasonedVariable(
        name=ROOTS, value=os.pathsep.join((here.source, *here.path)), reason="where this interpreter has its modules"
    )
    return cell.model_copy(
        update={
            "id": found.nearest,
            "megatron_core": found.nearest,
            "contract_class": found.nearest,
            "expected_mode": ("hook" if modes.get("gpt") == "hook" else "legacy") if fused else None,
            "tags": (PREDICTED,) if fused else (),
            "torch": here.distributions.get("torch", "0"),
            "python": ".".join(here.python.split(".")[:2]),
            "lane": "gpu" if here.gpus else "cpu",
            "env": (*cell.env, roots),
        }
    )
