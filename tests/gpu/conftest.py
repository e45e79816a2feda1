"""Set-up of a GPU cell: that of the property suite, and a proof for every check that the promised kernel ran.

On a host without a GPU the same checks run as a rehearsal of their logic, with torch in the kernel's place; the judge
never calls that green. Where there is no megatron-core only the kernel's own checks are collected.
"""

import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_COMPAT = _HERE.parent / "compat"
# The kernel's own checks know nothing of megatron-core: they run once, by themselves, and not in every cell.
# Those of several ranks are a suite of their own (`ci/gpu --nproc`).
collect_ignore = ["parallel"]
if importlib.util.find_spec("megatron") is None:
    collect_ignore_glob = ["test_lane_*", "test_same_*"]
else:
    collect_ignore_glob = ["test_kernel_*"] if "MCORE_COMPAT_CELL_ID" in os.environ else []
    sys.path[:0] = [str(_HERE), str(_COMPAT)]
    _spec = importlib.util.spec_from_file_location("compat_session", _COMPAT / "conftest.py")
    sys.modules["compat_session"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["compat_session"])
    pytest_plugins = ["compat_session", "lane.session"]
