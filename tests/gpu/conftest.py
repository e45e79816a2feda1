"""Set-up of a GPU cell: the property suite's session, and proof for every check that the promised kernel ran.

On a host without a GPU the same checks run as a rehearsal of their logic, with torch in the kernel's place; the judge
never calls that green. Where there is no megatron-core only the kernel's own checks are collected.
"""

import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
# The kernel's own checks know nothing of megatron-core: they run once, by themselves, and not in every cell.
# Those of several ranks are a suite of their own (`ci/gpu --nproc`).
collect_ignore = ["parallel"]
if importlib.util.find_spec("megatron") is None:
    collect_ignore_glob = ["test_lane_*", "test_same_*"]
else:
    collect_ignore_glob = ["test_kernel_*"] if "MCORE_COMPAT_CELL_ID" in os.environ else []
    sys.path[:0] = [str(_HERE), str(_HERE.parent / "compat")]
    pytest_plugins = ["support.session", "lane.session"]
