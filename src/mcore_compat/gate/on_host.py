"""The gate on a GPU host as it is: both sides from wheels, with the host's torch and triton, and no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from mcore_compat.contract.source.candidate import Candidate, CandidateKind
from mcore_compat.errors import UsageError
from mcore_compat.gate.cells import cell_of_release
from mcore_compat.gate.model import GateReport, Tier
from mcore_compat.gate.sides import Sides, paired_cells, static_findings
from mcore_compat.gate.steps import Ran, compared, concluded, witnesses_of
from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.host_lane import LaneConfig, run_lane
from mcore_compat.pipeline.progress import Display
from mcore_compat.provision.wheelhouse import Wheelhouse

__all__ = ["carried", "run_gate_on_image"]


def run_gate_on_image(
    config: LaneConfig,
    house: Wheelhouse,
    sides: Sides,
    host: Mapping[str, str],
    display: Callable[[int], AbstractContextManager[Display]],
    *,
    rerun: bool = True,
) -> tuple[GateReport, Ran]:
    """Judge the candidate against the baseline with the GPU lane's suite, on this host.

    Args:
        config: paths and options of the lane; its cells are not used.
        house: the bundle.
        sides: both megatron-cores, read.
        host: the caller's environment.
        display: makes the display for a number of cells.
        rerun: run both again where they differ.

    Raises:
        UsageError: a side is neither in the bundle nor a wheel.
        InfrastructureError: the host has no torch, or the subject's wheel does not build.
    """
    begun = time.monotonic()
    static = static_findings(sides)
    tiers = [Tier(name="static", ran=True, seconds=round(time.monotonic() - begun, 1), note="nothing was run")]
    before, after = paired_cells(sides)
    house = carried(house, sides, (before, after))
    lane = replace(config, cells=tuple(dict.fromkeys((before, after))))

    def once() -> Ran:
        with display(len(lane.cells)) as shown:
            return Ran(*run_lane(lane, house, host, shown))

    begun = time.monotonic()
    first, pairs = compared(once, (before, after), rerun=rerun)
    results = {"old": first.cells[before.id], "new": first.cells[after.id]}
    seconds = round(time.monotonic() - begun, 1)
    outcomes, witnesses = witnesses_of(static, (before, after), results, lane.work / "cells", host)
    tiers += [
        Tier(name="cpu", ran=False, note="this lane has GPU cells only"),
        witnesses,
        # Without a GPU this is a rehearsal: the judge finds both sides unproven, and so does the gate.
        Tier(name="gpu", ran=True, seconds=seconds),
    ]
    report = first.report
    return concluded(sides, static, outcomes, pairs, tiers, results, report.run_id, report), first


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
            raise UsageError(f"{candidate.label} is not in the bundle.", _way(candidate))
    return house


def _way(candidate: Candidate) -> str:
    if candidate.kind is CandidateKind.RELEASE:
        return "Make the bundle with it (`ci/bundle`), or give the path of its wheel."
    return "This lane installs wheels only: build one where a network is (`uv build --wheel`), and give its path."
