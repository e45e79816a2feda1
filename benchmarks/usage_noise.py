"""Findings at each downstream's own pin, where every one is a false alarm until shown otherwise.

python benchmarks/usage_noise.py --clone path/to/Megatron-LM --json noise.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.targets import known_releases, lists_folder, open_tree
from mcore_compat.usage.upstream import SummaryCache, git_tree
from mcore_compat.usage.use_lists import load_use_lists


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clone", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cache = SummaryCache()
    report = {}
    total: Counter = Counter()
    for uses in load_use_lists(lists_folder()):
        if not uses.pin:
            continue
        if "." in uses.pin:
            tree = open_tree(parse_candidate(uses.pin), known_releases(), cache)
        else:
            tree = git_tree(options.clone, uses.pin)
        findings = check_uses(uses.extracted.uses, Side.of(Resolver(tree, cache)))
        total.update(uses=len(uses.extracted.uses), findings=len(findings))
        report[uses.name] = {
            "version": uses.extracted.version,
            "pin": uses.pin[:12],
            "uses": len(uses.extracted.uses),
            "findings": [[f.severity.value, f.where, f.message] for f in findings],
        }
        print(f"{uses.name:16} {uses.pin[:12]:12} {len(uses.extracted.uses):5} uses {len(findings):3} findings")
        for finding in findings:
            print("   ", finding.severity.value, finding.where, finding.message)
    cache.close()
    print(f"{total['findings']} findings in {total['uses']} uses: 1 in {total['uses'] / max(1, total['findings']):.0f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
