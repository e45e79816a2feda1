"""The GPU lane from plan to report, on a host whose torch, triton and numpy are taken as they are.

The same judge and the same report as everywhere; only the environments are made differently (:mod:`image`), and the
host itself is proved unchanged at the end.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from mcore_compat.errors import InfrastructureError
from mcore_compat.files.scrub import Scrubber
from mcore_compat.judge.cell import judge_cell, judge_expectations
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.expectations import Expectations, load_expectations
from mcore_compat.matrix.inventory import Inventory, check_of, load_inventory
from mcore_compat.pipeline.progress import Display
from mcore_compat.pipeline.run_folder import RunFolder, RunPlan, new_run_id
from mcore_compat.provision.host_image import Image, image_cell, link_farm, provision_in_image, read_image
from mcore_compat.provision.wheelhouse import Wheelhouse
from mcore_compat.records import ProjectWheel
from mcore_compat.results import CellResult, Finding, Report, SubjectInfo
from mcore_compat.run.suite import SuiteOptions, run_suite
from mcore_compat.subjects.published import peer_wheel
from mcore_compat.subjects.selection import OURS, ChosenSubject
from mcore_compat.verdicts import Verdict, worst

__all__ = ["LaneConfig", "build_subject_offline", "run_lane"]


@dataclass(frozen=True)
class LaneConfig:
    """What the caller asked for.

    Attributes:
        root: the project's root.
        suite: the folder of checks.
        inventory: the declared checks of this suite.
        work: where environments live during the run.
        reports: where runs are written.
        cells: the cells to judge, as the matrix has them.
        jobs: cells side by side.
        profile: the Hypothesis profile.
        limit_s: seconds for one cell's suite.
        commit: what the checkout says of itself where git is not there to ask.
        variables: passed to the suite.
        subject: the implementation that the suite judges.
    """

    root: Path
    suite: Path
    inventory: Path
    work: Path
    reports: Path
    cells: tuple[Cell, ...]
    jobs: int
    profile: str
    limit_s: int
    commit: str | None
    variables: Mapping[str, str]
    subject: ChosenSubject = OURS


@dataclass(frozen=True)
class _Lane:
    config: LaneConfig
    house: Wheelhouse
    farm: Path
    subject: ProjectWheel
    inventory: Inventory
    expectations: Expectations
    folder: RunFolder
    host: Mapping[str, str]
    cancel: threading.Event


def run_lane(
    config: LaneConfig, house: Wheelhouse, host: Mapping[str, str], display: Display
) -> tuple[Report, RunFolder]:
    """Judge the cells on this host; the report is not yet written.

    Raises:
        UsageError: a data file is wrong.
        InfrastructureError: the host has no torch, or the subject's wheel does not build.
    """
    started, clock = dt.datetime.now(dt.UTC), time.monotonic()
    image = read_image()
    subject = build_subject_offline(config.root, config.work / "subject", config.commit)
    cells = tuple(
        image_cell(cell, image, house, host, {**config.variables, **_card(config, image, host, place)}, config.limit_s)
        for place, cell in enumerate(config.cells)
    )
    peer = config.subject.peer
    if peer is not None:
        peer_wheel(house.folder, peer)  # missing or another: said before any cell is made
    inputs = {"subject": subject.sha256, "judged": config.subject.digest, "suite": _digest_of_suite(config.root)}
    plan = RunPlan(
        run_id=new_run_id(started),
        started=started.isoformat(timespec="seconds"),
        planned=tuple(cell.id for cell in cells),
        profile=config.profile,
        inputs=inputs,
    )
    inventory = load_inventory(config.inventory)
    expected = load_expectations(config.root / "compat_matrix" / "expectations.toml")
    lane = _Lane(
        config=config,
        house=house,
        farm=link_farm(image, house, config.work / "image", peer),
        subject=subject,
        inventory=inventory,
        expectations=expected.about({check.id for check in inventory.check}),
        folder=RunFolder.create(config.reports, plan, _scrubber(config, host)),
        host=host,
        cancel=threading.Event(),
    )
    results = _all_judged(lane, cells, display)
    findings = (_seen(image), *_changes(image), *judge_expectations(lane.expectations, cells, results))
    verdicts = [result.verdict for result in results] + [f.verdict for f in findings if f.verdict is not None]
    report = Report(
        run_id=plan.run_id,
        started=plan.started,
        seconds=round(time.monotonic() - clock, 1),
        verdict=worst(verdicts),
        subject=SubjectInfo(
            name=subject.name,
            version=subject.version,
            sha256=subject.sha256,
            commit=subject.commit,
            judged=config.subject.name,
            judged_version=peer.version if peer is not None else None,
            judged_sha256=peer.sha256 if peer is not None else None,
        ),
        suite_sha256=inputs["suite"],
        profile=config.profile,
        planned=plan.planned,
        cells=results,
        findings=findings,
    )
    return report, lane.folder


def _card(config: LaneConfig, image: Image, host: Mapping[str, str], place: int) -> dict[str, str]:
    """Cells of one rank take turns on the cards; cells of several ranks, and a caller's own choice, have them all."""
    several = "MCORE_COMPAT_NPROC" in config.variables
    if several or len(image.gpus) < 2 or "CUDA_VISIBLE_DEVICES" in host:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(place % len(image.gpus))}


def _all_judged(lane: _Lane, cells: tuple[Cell, ...], display: Display) -> tuple[CellResult, ...]:
    finished: dict[str, CellResult] = {}
    with ThreadPoolExecutor(max_workers=max(1, lane.config.jobs), thread_name_prefix="cell") as pool:
        futures: list[Future[CellResult]] = [pool.submit(_judged, lane, cell, display) for cell in cells]
        try:
            for future in as_completed(futures):
                result = future.result()
                finished[result.id] = result
        except BaseException:
            lane.cancel.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return tuple(finished[cell.id] for cell in cells)


def _judged(lane: _Lane, cell: Cell, display: Display) -> CellResult:
    config = lane.config
    display.phase(cell.id, "environment")
    provisioned = provision_in_image(
        cell, lane.house, lane.farm, lane.subject, config.work / "cells", lane.host, config.subject.peer
    )
    suite = None
    if provisioned.environment is not None:
        display.phase(cell.id, f"environment made and proved in {provisioned.seconds:.1f} s, suite started")
        options = SuiteOptions(config.suite, config.profile, subject=config.subject)
        suite = run_suite(cell, provisioned.environment, options, lane.folder.cell(cell.id), lane.host, lane.cancel)
        lane.folder.save_text(f"cells/{cell.id}/lock.txt", provisioned.environment.lock)
    today = dt.datetime.now(dt.UTC).date()
    judged = _advised(
        judge_cell(cell, provisioned, suite, lane.inventory, lane.expectations, today, subject=config.subject),
        config.subject,
    )
    measured = _measured(lane.folder.cell(cell.id) / "reportlog.jsonl")
    judged = judged.model_copy(update={"findings": (*judged.findings, *measured)})
    result = lane.folder.save_result(judged)
    display.done(result)
    return result


def _advised(result: CellResult, subject: ChosenSubject = OURS) -> CellResult:
    """The environments of this lane are gone when somebody reads the report: say how to come back to one."""
    # A gate's side that is no cell of the matrix cannot be selected.
    options = f"--select {result.id}" + ("" if subject.is_ours else f" --subject {subject.name}")
    how = "the same command" if result.id in {"baseline", "candidate"} else f"`ci/gpu {options}`"
    again = f"Again: {how}; its log is in the run's folder, cells/{result.id}/output.log."
    findings = tuple(
        finding.model_copy(update={"next_step": again}) if finding.next_step.startswith("By hand:") else finding
        for finding in result.findings
    )
    return result.model_copy(update={"findings": findings})


def _measured(log: Path) -> tuple[Finding, ...]:
    """What checks measured and want told (pytest's ``record_property``); it is held against nobody."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        if isinstance(entry, dict) and entry.get("when") == "teardown":
            check = check_of(str(entry.get("nodeid")))
            found += [
                Finding(kind="measured", message=f"{name}: {value}", check=check)
                for name, value in entry.get("user_properties") or ()
            ]
    return tuple(found)


def build_subject_offline(root: Path, store: Path, commit: str | None) -> ProjectWheel:
    """Build this project's wheel with the bundle's hatchling, in a process that only sees the harness's own path.

    Raises:
        InfrastructureError: it does not build.
    """
    store.mkdir(parents=True, exist_ok=True)
    for old in store.glob("*.whl"):
        old.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", store],
        cwd=root,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1577836800"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    built = sorted(store.glob("*.whl"))
    if done.returncode != 0 or len(built) != 1:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InfrastructureError(f"This project's own wheel does not build: {last}.", "Correct pyproject.toml.")
    name, version = built[0].name.split("-")[:2]
    digest = hashlib.sha256(built[0].read_bytes()).hexdigest()
    return ProjectWheel(name=name.replace("_", "-"), version=version, sha256=digest, commit=commit, wheel=built[0])


def _seen(image: Image) -> Finding:
    """Said in every report: the host that it speaks of."""
    return Finding(kind="image", message=f"Host: {image}", next_step="")


def _changes(image: Image) -> tuple[Finding, ...]:
    """What the run did to the host's own torch, triton and numpy; it must be nothing."""
    after = read_image(image.sites)
    if after.digest == image.digest:
        return (Finding(kind="image-unchanged", message="torch, triton and numpy of the host are what they were"),)
    return (
        Finding(
            kind="image-changed",
            message=f"torch, triton or numpy of the host were changed during the run: {image} became {after}",
            next_step="Find out what wrote to the image; no result of this run can be trusted.",
            verdict=Verdict.INFRA,
        ),
    )


def _scrubber(config: LaneConfig, host: Mapping[str, str]) -> Scrubber:
    roots = {
        "reports": config.reports,
        "cells": config.work / "cells",
        "image": config.work / "image",
        "suite": config.suite,
        "root": config.root,
        "tmp": Path(tempfile.gettempdir()),
        "python": Path(sys.prefix),
    }
    home = host.get("HOME")
    return Scrubber(roots | ({"home": Path(home)} if home else {}))


def _digest_of_suite(root: Path) -> str:
    """Over the GPU checks and over what they take from the property suite."""
    total = hashlib.sha256()
    for folder in ("gpu", "compat"):
        for path in sorted((root / "tests" / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
