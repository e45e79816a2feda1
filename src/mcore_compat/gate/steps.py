"""The steps of a gate: which lanes both sides are run in, for each of the gate's two front doors."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mcore_compat.contract.source.candidate import Candidate, CandidateKind
from mcore_compat.errors import UsageError
from mcore_compat.gate.cells import cell_of_release
from mcore_compat.gate.run import GateStep
from mcore_compat.gate.sides import Sides, paired_cells
from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.lanes import ImageLane, IndexLane
from mcore_compat.pipeline.session import RunOptions
from mcore_compat.project import Project
from mcore_compat.provision.wheelhouse import Wheelhouse

__all__ = ["carried", "image_steps", "index_steps"]


def index_steps(
    project: Project, sides: Sides, options: RunOptions, host: Mapping[str, str], *, has_gpu: bool | None = None
) -> tuple[GateStep, ...]:
    """Cells from the package index: on the CPU, then with the GPU suite if this host has a GPU.

    Args:
        project: where the files are.
        sides: both megatron-cores, read.
        options: how the CPU cells are run.
        host: the caller's environment variables.
        has_gpu: whether this host has a GPU; None: ask it.
    """
    before, after = paired_cells(sides)

    def open_lane() -> IndexLane:
        return IndexLane.open(project, sides.matrix.requirements, host, options.subject)

    cpu = GateStep("cpu", project, (before, after), options, open_lane)
    gpu = GateStep(
        "gpu",
        project.gpu,
        (_on_gpu(before), _on_gpu(after)),
        replace(options, profile="gpu", workers=0),
        None,
        note="",
    )
    if not options.subject.is_ours:
        return cpu, replace(gpu, note="its suite judges this project's own library only")
    if not (_has_gpu() if has_gpu is None else has_gpu):
        return cpu, replace(gpu, note="this host has no GPU")
    return cpu, replace(
        gpu, open_lane=lambda: IndexLane.open(project.gpu, sides.matrix.requirements, host, options.subject)
    )


def image_steps(
    project: Project,
    sides: Sides,
    options: RunOptions,
    house: Wheelhouse,
    work: Path,
    host: Mapping[str, str],
    *,
    limit_s: int,
    commit: str | None,
) -> tuple[GateStep, ...]:
    """Cells on this host's own torch and triton, from wheels alone and without a network.

    Raises:
        UsageError: a side is neither in the bundle nor a wheel.
    """
    cells = paired_cells(sides)
    carried_house = carried(house, sides, cells)

    def open_lane() -> ImageLane:
        return ImageLane.open(project.gpu, carried_house, work, host, limit_s=limit_s, commit=commit)

    # Without a GPU this is a rehearsal: the judge finds both sides unproven, and so does the gate.
    return (
        GateStep("cpu", project, cells, options, None, note="this lane has GPU cells only"),
        GateStep("gpu", project.gpu, cells, options, open_lane),
    )


def carried(house: Wheelhouse, sides: Sides, cells: tuple[Cell, Cell]) -> Wheelhouse:
    """The bundle with both sides in it; a wheel that the caller names is added with what its nearest release needs.

    Raises:
        UsageError: a side would have to be built or downloaded.
    """
    for candidate, cell in zip((sides.baseline, sides.candidate), cells, strict=True):
        if candidate.kind is CandidateKind.WHEEL and candidate.path is not None:
            nearest = cell_of_release(sides.matrix, cell.megatron_core)
            needs = house.cells.get(nearest.megatron_requirement, ())[1:] if nearest is not None else ()
            house = house.including(cell.megatron_requirement, candidate.path, needs)
        elif cell.megatron_requirement not in house.cells:
            raise UsageError(f"{candidate.label} is not in the bundle.", _how_to_bring(candidate))
    return house


def _how_to_bring(candidate: Candidate) -> str:
    if candidate.kind is CandidateKind.RELEASE:
        return "Make the bundle with it (`ci/bundle`), or give the path of its wheel."
    return "This lane installs wheels only: build one where a network is (`uv build --wheel`), and give its path."


def _on_gpu(cell: Cell) -> Cell:
    return cell.model_copy(update={"id": f"{cell.id}-gpu", "lane": "gpu"})


def _has_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout
