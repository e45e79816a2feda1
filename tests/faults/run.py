"""``nox -s faults``: plant every fault of the catalogue and prints fault -> caught by -> seconds.

Each fault is planted in a copy; the checks that must catch it run against the copy, in a child forked from a process
that has imported torch and Megatron once. The same checks run against the untouched copy first: a check that fails
there catches nothing. Exit code 0: every fault was caught by what the catalogue names; 1: not; 2: the catalogue is
wrong; 3: there is no place to run in.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import places
import whole_runs
from catalogue import ROOT, CatalogueError, Fault, load

CONTROL = "(nothing planted)"


def controls(place: str, faults: list[Fault]) -> list[Fault]:
    """The untouched source with every check that a fault of this place names, once for each environment."""
    checks: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    for fault in faults:
        checks.setdefault(tuple(fault.env.items()), {}).update(dict.fromkeys(fault.caught_by))
    return [
        Fault(CONTROL, "nothing is planted", "", place, "", (), tuple(named), env=dict(env))
        for env, named in checks.items()
    ]


def main() -> int:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="shell patterns over fault ids; default: all")
    parser.add_argument("--python", action="append", default=[], metavar="PLACE=PATH", help="0.18=…/bin/python")
    parser.add_argument("--place", action="append", default=[], help="only faults of these places")
    parser.add_argument("--jobs", type=int, default=2, help="places side by side")
    parser.add_argument("--cells-dir", type=Path, default=ROOT / ".cells")
    parser.add_argument("--messages", action="store_true", help="also print how each fault showed")
    options = parser.parse_args()
    try:
        chosen = [fault for fault in load() if _wanted(fault, options)]
    except CatalogueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outdated = [problem for fault in chosen if (problem := fault.problem())]
    chosen = [fault for fault in chosen if not fault.problem()]
    if not chosen:
        print("error: no fault has such an id", *outdated, sep="\n", file=sys.stderr)
        return 2
    started = time.monotonic()
    by_place = {place: [f for f in chosen if f.place == place] for place in dict.fromkeys(f.place for f in chosen)}
    pythons = dict(text.split("=", 1) for text in options.python)
    try:
        interpreters = places.interpreters(set(by_place), pythons, options.cells_dir)
    except places.NoPlaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        futures = []
        for place, faults in by_place.items():
            scratch = Path(folder, place)
            scratch.mkdir()
            if place == "run":
                futures.append(pool.submit(whole_runs.plant_all, faults, options.cells_dir, scratch))
            else:
                lane = [*controls(place, faults), *faults]
                futures.append(pool.submit(places.plant_all, place, lane, interpreters[place], scratch))
        outcomes = [outcome for future in futures for outcome in future.result()]
    bad = _print(outcomes, messages=options.messages)
    planted = [outcome for outcome in outcomes if outcome.fault.id != CONTROL]
    caught = sum(outcome.caught for outcome in planted)
    for problem in outdated:
        print(f"NOT PLANTED: {problem}")
    print(f"\n{caught} of {len(planted) + len(outdated)} faults caught, {time.monotonic() - started:.0f} s")
    return 1 if bad or outdated else 0


def _wanted(fault: Fault, options: argparse.Namespace) -> bool:
    named = not options.only or any(fnmatch.fnmatchcase(fault.id, pattern) for pattern in options.only)
    return named and (not options.place or fault.place in options.place)


def _print(outcomes: list[places.Outcome], *, messages: bool) -> bool:
    width = max(len(outcome.fault.id) for outcome in outcomes)
    print(f"{'fault':{width}}  {'where':7}  {'s':>5}  caught by")
    for outcome in outcomes:
        by = outcome.by if outcome.caught else f"NOT CAUGHT: {outcome.by}"
        if outcome.fault.id == CONTROL:
            by = f"{outcome.by} pass" if outcome.caught else f"CONTROL FAILS: {outcome.by}"
        print(f"{outcome.fault.id:{width}}  {outcome.fault.place:7}  {outcome.seconds:5.1f}  {by}")
        if messages and outcome.message:
            print(f"{'':{width}}  {outcome.message[:150]}")
    return not all(outcome.caught for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
