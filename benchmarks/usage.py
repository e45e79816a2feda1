"""Time and memory of `check` over all use lists and releases, cold (empty cache) and warm.

taskset -c 0,1 python benchmarks/usage.py --json figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ONE = """
import json, resource, sys, time
start = time.perf_counter()
from mcore_compat.usage.downstreams import assess_all
from mcore_compat.usage.targets import lists_folder, open_sides
from mcore_compat.usage.use_lists import load_use_lists
lists = [one for one in load_use_lists(lists_folder()) if one.name != "mcore_fused"][: int(sys.argv[2])]
with open_sides((sys.argv[1],)) as sides:
    reports = assess_all(lists, sides.sides)
    parsed, count = sides.cache.parsed, len(sides.sides)
usage = resource.getrusage(resource.RUSAGE_SELF)
print("ANSWER" + json.dumps({
    "downstreams": len(lists), "megatrons": count, "uses": sum(len(one.extracted.uses) for one in lists),
    "findings": sum(len(c.findings) for r in reports for c in r.columns), "modules_parsed": parsed,
    "wall_s": round(time.perf_counter() - start, 1), "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
    "peak_mb": round(usage.ru_maxrss / 1024),
}))
"""


def once(span: str, downstreams: int, cache: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", ONE, span, str(downstreams)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MCORE_COMPAT_CACHE": cache},
    )
    return json.loads(done.stdout.partition("ANSWER")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for span, downstreams in (("0.18..0.19", 3), ("0.18..0.19", 9), ("0.12..0.19", 3), ("0.12..0.19", 9)):
            rows.append({"against": span, **once(span, downstreams, cache)})
            print(rows[-1], flush=True)
    load = os.getloadavg()[0]
    print(f"load of the host: {load:.0f}")
    if options.json:
        options.json.write_text(json.dumps({"load": round(load), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
