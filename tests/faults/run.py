"""``nox -s faults``: plants every fault of the catalogue and prints fault -> caught by -> seconds.

Each fault is planted in a copy; the checks that must catch it run against the copy, in a child forked from a process
that has imported torch and Megatron once. The same checks run against the untouched copy: a check that fails there
catches nothing. Exit code 0: every fault was caught by what the catalogue names; 1: not; 2: the catalogue is wrong;
3: there is no place to run in.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from pathlib import Path

import places
import whole_runs
from catalogue import ROOT, CatalogueError, Fault, load
from passed import read_passed, without_passed
from tally import Tally

CONTROL = "(nothing planted)"
# The order in which places are begun: what takes longest first, so that both workers end together.
ORDER = ("run", "unit", "0.18", "upstream", "harness", "0.17", "0.19")


def controls(place: str, faults: Iterable[Fault]) -> list[Fault]:
    """The untouched source with every check that a fault of this place names, one run a file and environment."""
    checks: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, None]] = {}
    for fault in faults:
        for check in fault.caught_by:
            checks.setdefault((check.partition("::")[0], tuple(fault.env.items())), {})[check] = None
    return [
        Fault(CONTROL, "nothing is planted", "", place, "", (), tuple(named), env=dict(env))
        for (_, env), named in checks.items()
    ]


def main() -> int:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="shell patterns over fault ids; default: all")
    parser.add_argument("--python", action="append", default=[], metavar="PLACE=PATH", help="0.18=…/bin/python")
    parser.add_argument("--place", action="append", default=[], help="only faults of these places")
    parser.add_argument("--jobs", type=int, default=2, help="faults side by side")
    parser.add_argument("--cells-dir", type=Path, default=ROOT / ".cells")
    parser.add_argument("--results", type=Path, help="write the counts by kind there, as JSON")
    parser.add_argument(
        "--passed", type=Path, action="append", default=[], metavar="FILE",
        help="results of this same checkout (unit.xml, report.json): no control for checks that pass in them",
    )  # fmt: skip
    parser.add_argument("--messages", action="store_true", help="also print how each fault showed")
    options = parser.parse_args()
    try:
        catalogue = load()
    except CatalogueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = [fault for fault in catalogue if _wanted(fault, options)]
    outdated = {fault.id: problem for fault in chosen if (problem := fault.problem())}
    plantable = [fault for fault in chosen if fault.id not in outdated]
    if not plantable:
        print("error: no fault has such an id", *outdated.values(), sep="\n", file=sys.stderr)
        return 2
    width = max(len(fault.id) for fault in plantable)
    tally = Tally(catalogue, chosen, outdated)

    def seen(outcome: places.Outcome) -> None:
        tally.add(outcome)
        print(_line(outcome, width, messages=options.messages), flush=True)

    try:
        _plant(plantable, options, seen)
    except places.NoPlaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(tally.text())
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(tally.as_json(), encoding="utf-8")
    return 0 if tally.green else 1


def _plant(faults: list[Fault], options: argparse.Namespace, seen: Callable[[places.Outcome], None]) -> None:
    """Plant them all, ``options.jobs`` side by side; whole runs one after the other, since they share a cell."""
    by_place = {place: found for place in ORDER if (found := [fault for fault in faults if fault.place == place])}
    passed = read_passed(options.passed)
    pythons = dict(text.split("=", 1) for text in options.python)
    interpreters = places.interpreters(set(by_place), pythons, options.cells_dir)
    print(f"{'fault':{max(len(fault.id) for fault in faults)}}  {'where':7}  {'s':>5}  caught by")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        tasks: list[Callable[[], Iterable[places.Outcome]]] = []
        for place, found in by_place.items():
            scratch = folder / place
            scratch.mkdir()
            if place == "run":
                tasks.append(lambda found=found, scratch=scratch: _each(found, options.cells_dir, scratch, seen))
                continue
            lane = stack.enter_context(closing(places.Lane(place, interpreters[place], scratch)))
            left = without_passed(controls(place, found), passed)
            tasks += [lambda lane=lane, fault=fault: [lane.plant(fault)] for fault in (*left, *found)]
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        try:
            for future in as_completed([pool.submit(task) for task in tasks]):
                for outcome in future.result():
                    seen(outcome)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _each(faults: list[Fault], cells: Path, scratch: Path, seen: Callable[[places.Outcome], None]) -> tuple[()]:
    """Whole runs are told of as they end, not when the last of them has."""
    for outcome in whole_runs.plant_all(faults, cells, scratch):
        seen(outcome)
    return ()


def _wanted(fault: Fault, options: argparse.Namespace) -> bool:
    named = not options.only or any(fnmatch.fnmatchcase(fault.id, pattern) for pattern in options.only)
    return named and (not options.place or fault.place in options.place)


def _line(outcome: places.Outcome, width: int, *, messages: bool) -> str:
    by = outcome.by if outcome.caught else f"NOT CAUGHT: {outcome.by}"
    if not outcome.fault.replace:
        by = f"{outcome.by} pass" if outcome.caught else f"CONTROL FAILS: {outcome.by}"
    line = f"{outcome.fault.id:{width}}  {outcome.fault.place:7}  {outcome.seconds:5.1f}  {by}"
    return f"{line}\n{'':{width}}  {outcome.message[:150]}" if messages and outcome.message else line


if __name__ == "__main__":
    sys.exit(main())
