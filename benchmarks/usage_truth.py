"""Compares what `check` reads from source with what a real environment says, for every symbol of the use lists.

    python benchmarks/usage_truth.py --cells .cells --json truth.json

In each cell every symbol is imported and looked up with getattr, and its signature is taken with inspect.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from pathlib import Path

from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.usage.model import UseKind
from mcore_compat.usage.resolve import Resolver, State
from mcore_compat.usage.signatures import signatures_of
from mcore_compat.usage.targets import known_releases, lists_folder
from mcore_compat.usage.upstream import SummaryCache, open_upstream
from mcore_compat.usage.use_lists import load_use_lists

PROBE = r"""
import importlib, inspect, json, sys, types, warnings
warnings.simplefilter("ignore")
modules = {}
def load(name):
    if name not in modules:
        try:
            modules[name] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            outside = not (error.name or "").startswith("megatron")
            modules[name] = ("absent", repr(error)) if outside else None
        except BaseException as error:
            modules[name] = ("absent", repr(error))
    return modules[name]
KINDS = {0: "/", 1: "", 2: "*args", 3: "*", 4: "**kwargs"}
def ask(symbol):
    parts = symbol.split(".")
    current, path = load(parts[0]), parts[0]
    for part in parts[1:]:
        path = f"{path}.{part}"
        if isinstance(current, types.ModuleType) and not hasattr(current, part):
            current = load(path)
            if isinstance(current, tuple):
                return ["absent", current[1]]
            if current is None:
                return ["missing", path]
        elif hasattr(current, part):
            current = getattr(current, part)
        else:
            return ["missing", path]
    signature = None
    if inspect.isfunction(current) or inspect.isclass(current):
        try:
            signature = [
                [p.name, KINDS[p.kind], int(p.default is p.empty and p.kind not in (2, 4))]
                for p in inspect.signature(current).parameters.values()
            ]
        except (TypeError, ValueError):
            pass
    return ["present", signature]
print("ANSWER" + json.dumps({symbol: ask(symbol) for symbol in json.load(sys.stdin)}))
"""
VISIBLE = {UseKind.IMPORT, UseKind.ATTRIBUTE, UseKind.CALL, UseKind.SUBCLASS, UseKind.PATCH, UseKind.SUPER}


def symbols(folder: Path) -> list[str]:
    found = set()
    for uses in load_use_lists(folder):
        for use in uses.extracted.uses:
            # What is only on instances cannot be seen with getattr on a class.
            if use.symbol.startswith("megatron.core") and use.kind in VISIBLE and not use.bound:
                found.add(use.symbol)
    return sorted(found)


def reality(python: Path, names: list[str]) -> dict[str, list]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    environment.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # 0.15 compiles an extension at import
    done = subprocess.run(
        [str(python), "-c", PROBE],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "ANSWER" not in done.stdout:
        raise SystemExit(f"{python}: {done.stderr[-800:]}")
    return json.loads(done.stdout.partition("ANSWER")[2])


def compare(resolver: Resolver, real: dict[str, list]) -> tuple[Counter, list, list]:
    counts: Counter = Counter()
    wrong, signatures = [], []
    for symbol, (state, detail) in real.items():
        found = resolver.resolve(symbol)
        if state == "absent":
            counts["cannot be imported there"] += 1
        elif found.state in {State.UNKNOWN, State.OUTSIDE}:
            counts[f"not claimed ({found.state.value})"] += 1
        elif (found.state is State.PRESENT) == (state == "present"):
            counts["agree"] += 1
        else:
            instance = any(t.instance or (isinstance(t.data, str) and t.kind == "value") for t in found.targets)
            counts["only on instances" if instance and state == "missing" else "disagree"] += 1
            wrong.append([symbol, found.state.value, state, str(detail)[:120]])
        if state == "present" and detail is not None and found.state is State.PRESENT:
            known = [signatures_of(resolver, target, bound=False) for target in found.targets]
            if len(known) == 1 and known[0] is not None and len(known[0]) == 1:
                mine = [[p.name, p.kind, int(p.required)] for p in known[0][0]]
                counts["signatures agree" if mine == detail else "signatures disagree"] += 1
                if mine != detail:
                    signatures.append([symbol, mine, detail])
            else:
                counts["signatures not claimed"] += 1
    return counts, wrong, signatures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, default=Path(".cells"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    names = symbols(lists_folder())
    cache = SummaryCache()
    report = {}
    for python in sorted(options.cells.glob("*/venv/bin/python")):
        cell = python.parents[2].name
        if options.only and cell not in options.only:
            continue
        tree = open_upstream(parse_candidate(str(python.parents[1])), known_releases())
        counts, wrong, signatures = compare(Resolver(tree, cache), reality(python, names))
        asked = counts["agree"] + counts["disagree"]
        share = counts["agree"] / asked if asked else 0.0
        report[cell] = {"symbols": len(names), "agreement": round(share, 4), **counts}
        report[cell] |= {"disagreements": wrong, "signature_disagreements": signatures}
        print(cell, f"{share:.2%}", dict(counts), flush=True)
    cache.close()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
