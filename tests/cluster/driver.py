"""A run of the stub cells on the cluster, as a process of its own that a test can end."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "harness"))

import cluster_stubs as stubs
from harness_project import Recorder

from mcore_compat.pipeline.cluster import ClusterExecutor
from mcore_compat.pipeline.execute import InterruptedRunError, execute
from mcore_compat.pipeline.ray_cluster import RayCluster


def main(folder: Path) -> int:
    session = stubs.stub_session(folder / "project", stubs.MATRIX.cells[-8:])
    try:
        report = execute(session, Recorder(), ClusterExecutor(RayCluster(folder / "store")))
    except InterruptedRunError:
        return 130
    session.folder.save_report(report)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(Path(sys.argv[1])))
