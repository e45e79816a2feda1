"""Starts the nodes of a Ray cluster on this machine."""

import contextlib
import os
import secrets
import socket
import tempfile
import threading
from pathlib import Path

STUBS = Path(__file__).parents[1] / "unit" / "harness"
MEMORY = 80 << 20
# A lost node is noticed in seconds; memory is what other work on this machine needs, so nothing is killed for it.
# No worker is started ahead: a driver waits without end for those that a busy machine starts too slowly.
SETTINGS = {
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "memory_monitor_refresh_ms": 0,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": 180,
}
LISTEN = "dashboard_agent_listen_port"
PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN, "runtime_env_agent_port")
NODE_ID = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"


@contextlib.contextmanager
def node_arguments(sessions):
    """What every node is started with.

    A node ends itself if its agents do not tell their ports within 15 s, which they do not on a busy machine. So the
    ports are chosen here, and the one that has no option is written where the agent would write it.
    """
    from ray._raylet import persist_port

    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in PORTS]
        for opened in sockets:
            opened.bind(("", 0))
        ports = dict(zip(PORTS, (opened.getsockname()[1] for opened in sockets), strict=True))
    os.environ[NODE_ID] = node_id = secrets.token_hex(28)
    done = threading.Event()

    def tell():
        while not done.wait(0.1):
            for session in sessions.glob("session_2*"):
                persist_port(str(session), node_id, LISTEN, ports[LISTEN])

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield {"object_store_memory": MEMORY, **ports}
    finally:
        done.set()
        teller.join()
        del os.environ[NODE_ID]


@contextlib.contextmanager
def started(nodes):
    """A running cluster that ``RAY_ADDRESS`` names.

    Args:
        nodes: the resources of each node; the first is the head.
    """
    os.environ["PYTHONPATH"] = str(STUBS)  # how workers find the stubs
    # Ray's next default; it warns where it is not set.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112  Ray's own spelling
    import ray
    from ray.cluster_utils import Cluster

    # Sockets have short names, so this is not below pytest's own folder.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        with node_arguments(Path(temporary)) as usual:
            head = {"include_dashboard": False, "_system_config": SETTINGS, "temp_dir": temporary, **nodes[0]}
            cluster = Cluster(initialize_head=True, head_node_args=head | usual)
        for resources in nodes[1:]:
            with node_arguments(Path(temporary)) as usual:
                cluster.add_node(temp_dir=temporary, **resources, **usual)
        cluster.wait_for_nodes(timeout=120)
        os.environ["RAY_ADDRESS"] = cluster.address
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            del os.environ["RAY_ADDRESS"]
