"""``ci/gpu``: the command line of the GPU lane."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.errors import UsageError
from mcore_compat.gate.on_host import run_gate_on_image
from mcore_compat.gate.sides import earlier_reports, read_sides, refuse_same
from mcore_compat.matrix.inventory import derive, load_inventory, write_text
from mcore_compat.matrix.selection import Selection, plan_cells
from mcore_compat.pipeline.host_lane import LaneConfig, run_lane
from mcore_compat.pipeline.progress import display_for
from mcore_compat.pipeline.session import default_jobs
from mcore_compat.provision.host_image import read_image
from mcore_compat.provision.wheelhouse import Wheelhouse
from mcore_compat.report import gate_text as gate_render
from mcore_compat.report import terminal
from mcore_compat.report.write import write_gate, write_run
from mcore_compat.results import Report
from mcore_compat.subjects.selection import BUILT_IN, DEFAULT_SUBJECT, ChosenSubject, choose_subject
from mcore_compat.verdicts import ExitCode, exit_code

__all__ = ["run_command"]

_WIDTH = 180


def run_command(arguments: Sequence[str], root: Path, bundle: Path, host: Mapping[str, str]) -> int:
    """Run the lane and report.

    Args:
        arguments: of the command line.
        root: the project's root.
        bundle: the bundle's folder, already looked at by the caller.
        host: the caller's environment.

    Returns:
        The exit code: 0 green, 1 break, 3 could not judge. With ``--fault``: 0 where every cell caught it.

    Raises:
        UsageError: an argument is wrong, or a data file.
        InfrastructureError: the host has no torch, or the subject's wheel does not build.
    """
    options = _parser().parse_args(arguments)
    candidate = _candidate(options)
    subject = _subject(options)
    house = Wheelhouse.read(bundle)
    house.check_host(platform.machine())
    matrix = load_classified_matrix(root / "compat_matrix")
    parallel = options.nproc > 1
    suite = root / "tests" / "gpu" / "parallel" if parallel else root / "tests" / "gpu"
    inventory = root / "compat_matrix" / ("inventory-parallel.toml" if parallel else "inventory-gpu.toml")
    variables = {"MCORE_COMPAT_FAULT": options.fault} if options.fault else {}
    variables |= {"MCORE_COMPAT_NPROC": str(options.nproc)} if parallel else {}
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    cards = len(read_image().gpus)
    if parallel and 0 < cards < options.nproc:
        raise UsageError(
            f"--nproc {options.nproc} needs a GPU for each rank, this host has {cards}.",
            "Leave --nproc out, or run on a host with more.",
        )
    if not cards:
        choose_subject(options.subject)  # its cells are CPU cells then: a package that needs a GPU is refused
    with tempfile.TemporaryDirectory(prefix="mcore-compat-gpu-", dir=options.work) as work:
        config = LaneConfig(
            root=root,
            suite=suite,
            inventory=inventory,
            work=Path(work),
            reports=(options.report_dir or root / "reports").absolute(),
            cells=plan_cells(matrix, Selection(patterns=tuple(options.select))),
            jobs=options.jobs,
            profile=options.profile,
            limit_s=options.limit,
            commit=options.commit or _commit(root),
            variables=variables,
            subject=subject,
        )
        if candidate is not None:
            return _gate(config, house, host, console, candidate, options)
        with display_for(console, len(config.cells)) as display:
            report, folder = run_lane(config, house, host, display)
    write_run(folder, report, root / "compat_matrix")
    folder.publish()
    console.print(terminal.render(report))
    if options.write_inventory:
        _write_inventory(inventory, report, config)
    if options.fault:
        return _caught(report)
    return exit_code(report.verdict)


def _candidate(options: argparse.Namespace) -> str | None:
    """The candidate where the gate is asked for, else None.

    Raises:
        UsageError: another word than the gate's, or an option that means nothing there.
    """
    if not options.gate:
        if options.baseline is not None or options.no_rerun:
            raise UsageError("--baseline and --no-rerun are the gate's.", "Write `ci/gpu gate CANDIDATE`.")
        return None
    word, *names = options.gate
    if word != "gate" or len(names) != 1:
        raise UsageError(
            f"`{' '.join(options.gate)}` is no command.", "Write `ci/gpu gate CANDIDATE`, or options only."
        )
    if options.select or options.fault or options.write_inventory:
        raise UsageError(
            "The gate judges two cells by itself.", "Leave --select, --fault and --write-inventory out with `gate`."
        )
    return str(names[0])


def _subject(options: argparse.Namespace) -> ChosenSubject:
    """What is judged.

    Raises:
        UsageError: there is no such subject, or it is asked for where only this project's own is judged.
    """
    subject = choose_subject(options.subject, "gpu")
    ours_only = {"gate": options.gate, "--fault": options.fault, "--nproc": options.nproc > 1}
    asked = [name for name, given in {**ours_only, "--write-inventory": options.write_inventory}.items() if given]
    if asked and not subject.is_ours:
        raise UsageError(f"`{asked[0]}` judges {DEFAULT_SUBJECT} only.", "Leave --subject out, or this.")
    return subject


def _gate(
    config: LaneConfig,
    house: Wheelhouse,
    host: Mapping[str, str],
    console: Console,
    candidate: str,
    options: argparse.Namespace,
) -> int:
    """``ci/gpu gate``: may we upgrade, by the GPU cells of both sides."""
    earlier = earlier_reports(config.root, config.reports)
    sides = read_sides(config.root, candidate, options.baseline, earlier)
    refuse_same(sides)
    gate, ran = run_gate_on_image(
        config, house, sides, host, lambda count: display_for(console, count), rerun=not options.no_rerun
    )
    write_gate(ran.folder, gate, ran.report, config.root / "compat_matrix")
    ran.folder.publish()
    sys.stdout.write(ran.folder.scrubber.text(gate_render.text(gate)))
    return exit_code(gate.verdict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ci/gpu", description="The GPU lane, with the host's own torch and triton.")
    parser.add_argument("gate", nargs="*", metavar="gate CANDIDATE", help="judge a release of the bundle, or a wheel")
    parser.add_argument("--baseline", "-b", help="of the gate; default: the newest green release")
    parser.add_argument("--no-rerun", action="store_true", help="of the gate: do not run twice where the sides differ")
    parser.add_argument(
        "--subject",
        default=DEFAULT_SUBJECT,
        help=f"what is judged: {', '.join(BUILT_IN)}, file.py:Class or module:Class",
    )
    parser.add_argument("--select", action="append", default=[], help="shell pattern over cell ids; repeatable")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="cells side by side; default: all cores")
    parser.add_argument("--nproc", type=int, default=1, help="ranks, one a GPU: above 1 the parallel checks run")
    parser.add_argument("--limit", type=int, default=420, help="seconds for one cell's suite")
    parser.add_argument("--profile", default="gpu", help="Hypothesis profile")
    parser.add_argument("--report-dir", type=Path, help="where runs are written; default: reports/")
    parser.add_argument("--work", type=Path, help="where environments are made; default: the system's temporary folder")
    parser.add_argument("--commit", help="the checkout's commit, for hosts where git cannot tell")
    parser.add_argument("--fault", help="plant this fault in every cell and demand that every cell catches it")
    parser.add_argument("--write-inventory", action="store_true", help="declare exactly the checks that ran")
    parser.add_argument("--bundle", type=Path, help="the offline bundle; default: .bundle/, made where it is missing")
    return parser


def _caught(report: Report) -> int:
    """Green only if no cell is: a fault that one cell misses is a hole in the suite."""
    missed = [cell.id for cell in report.cells if cell.verdict.green]
    if missed or not report.cells:
        sys.stdout.write(f"the planted fault was missed by {', '.join(missed) or 'all, since no cell ran'}\n")
        return ExitCode.BREAK
    sys.stdout.write(f"the planted fault was caught by all {len(report.cells)} cells\n")
    return ExitCode.GREEN


def _write_inventory(path: Path, report: Report, config: LaneConfig) -> None:
    executed = {
        cell.id: [result.check for result in cell.results if result.outcome != "skipped"]
        for cell in report.cells
        if cell.results
    }
    path.write_text(write_text(derive(executed, config.cells, load_inventory(path))), encoding="utf-8")


def _commit(root: Path) -> str | None:
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
