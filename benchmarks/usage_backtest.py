"""Make the use lists of the backtest again: sources as they were before the commit that mended a breakage.

    python benchmarks/usage_backtest.py --clones FOLDER

``FOLDER`` has a clone (or ``repo`` below it) for each repository, as ``owner+name``. Only facts are written: symbols,
kinds, files, lines, arguments and guards of the uses that are near the breakage.
"""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import replace
from pathlib import Path

from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.extract import extract_uses
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.shipped import shipped_tree
from mcore_compat.usage.sources import open_source
from mcore_compat.usage.upstream import SummaryCache
from mcore_compat.usage.use_lists import UseList, save_use_list

FOLDER = Path(__file__).parents[1] / "tests" / "unit" / "usage" / "backtest"
CACHE = SummaryCache()


def near(use, case) -> bool:
    """Whether a use belongs to the breakage: of the symbol, of a member, or of a symbol beside it."""
    if not case["told"]:  # what is not found yet may be found through any use of the file
        return True
    owner = case["symbol"].rpartition(".")[0]
    return any(
        f"{symbol}.".startswith(f"{case['symbol']}.") or symbol.rpartition(".")[0] == owner
        for symbol in (use.symbol, *use.alternatives)
    )


def side(version: str) -> Side:
    tree = shipped_tree(version, CACHE)
    assert tree is not None, version
    return Side.of(Resolver(tree, CACHE), version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clones", type=Path, required=True)
    clones = parser.parse_args().clones
    for case in tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))["case"]:
        clone = clones / case["repository"].replace("/", "+")
        clone = clone / "repo" if (clone / "repo").is_dir() else clone
        source = open_source(f"git+file://{clone}@{case['fix']}^", include=(case["file"],))
        whole = extract_uses(source)
        kept = replace(whole, name=case["id"], uses=tuple(use for use in whole.uses if near(use, case)))
        save_use_list(FOLDER, UseList(kept, case["good"]))
        found = check_uses(kept.uses, side(case["bad"]), side(case["good"]))
        told = any((f.rule, f.symbol) == (case["rule"], case["symbol"]) for f in found)
        mark = "" if told is case["told"] else "  DIFFERS"
        print(f"{case['id']:32} {len(kept.uses):4} uses of {len(whole.uses):5}  told {told}{mark}")


if __name__ == "__main__":
    main()
