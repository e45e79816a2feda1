"""The server that forks ranks ends before the process that started it: a cell leaves no process behind."""

import os
import sys
import threading
from pathlib import Path

import mcore_compat
from mcore_compat.provision.process import run_logged

PACKAGES = Path(mcore_compat.__file__).parents[1]
# Megatron is absent here, so the rank fails; the server is started all the same, and takes its time to end, as one with
# torch and Megatron in it does.
SLOW = "import atexit, time\natexit.register(time.sleep, 4)\n"
SUITE = """
import multiprocessing.forkserver, operator
from mcore_compat.testing import ranks
ranks._PRELOAD = "slow_to_end"
try:
    ranks.run_ranks(operator.add, 1, 2)
except AssertionError:
    pass
print("server", multiprocessing.forkserver._forkserver._forkserver_pid)
"""


def test_the_server_of_the_ranks_does_not_outlive_the_suite(tmp_path):
    (tmp_path / "slow_to_end.py").write_text(SLOW, encoding="utf-8")
    done = run_logged(
        [sys.executable, "-c", SUITE],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{PACKAGES}{os.pathsep}{tmp_path}"},
        log=tmp_path / "log",
        limit_s=120,
        cancel=threading.Event(),
    )
    assert done.returncode == 0, done.output
    assert "server None" not in done.output
    assert done.left_behind == ()
