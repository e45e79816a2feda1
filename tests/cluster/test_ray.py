"""A real Ray cluster loses a node, a worker and its driver; nothing that was judged is lost, doubled or blamed."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cluster_stubs as stubs
import pytest
from harness_project import Recorder

from mcore_compat.pipeline.cluster import ClusterExecutor, Request
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.ray_cluster import ClusterError, RayCluster
from mcore_compat.pipeline.run_folder import newest_unfinished
from mcore_compat.verdicts import Verdict

CELLS = stubs.MATRIX.cells[-8:]
IDS = [cell.id for cell in CELLS]
DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 60


class Watch(Recorder):
    """Notes where cells start."""

    def __init__(self):
        super().__init__()
        self.nodes = {}
        self.phases = []

    def phase(self, cell_id, phase):
        self.phases.append((cell_id, phase))
        if phase.startswith("started on node "):
            self.nodes[cell_id] = phase.rpartition(" ")[2]


def run_on_ray(folder, orders=None, cells=CELLS, resume=False, watch=None, request=None):
    root = folder / "project"
    if not root.exists():
        stubs.stub_project(folder, orders)
    resumed = newest_unfinished(root / "reports", "run") if resume else None
    session = stubs.stub_session(root, cells, resumed)
    executor = ClusterExecutor(RayCluster(folder / "store"), request or Request())
    watch = watch or Watch()
    try:
        return execute(session, watch, executor), session, watch
    finally:
        session.folder.alive.release()


def verdicts(report):
    return {cell.id: (cell.verdict, cell.reason, cell.checks) for cell in report.cells}


def local(folder, orders):
    session = stubs.stub_session(stubs.stub_project(folder / "local", orders), CELLS)
    return execute(session, Recorder())


def until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_verdicts_are_those_of_a_local_run_and_a_killing_cell_is_reported(nodes, tmp_path):
    orders = {IDS[0]: {"fails": True}}
    kills = {IDS[1]: {"kills": 99}, IDS[2]: {"kills": 1}}
    report, session, watch = run_on_ray(tmp_path, orders | kills)
    expected = verdicts(local(tmp_path, orders))
    found = verdicts(report)
    assert {cell_id: found[cell_id] for cell_id in IDS if cell_id != IDS[1]} == {
        cell_id: expected[cell_id] for cell_id in IDS if cell_id != IDS[1]
    }
    killer = session.folder.result(IDS[1])
    assert killer.verdict is Verdict.INFRA
    assert "killed its worker process 3 times" in killer.reason
    assert [finding.kind for finding in session.folder.result(IDS[2]).findings] == ["tried-again"]
    assert stubs.ended_cells(tmp_path / "project") == sorted(set(IDS) - {IDS[1]})
    assert sorted(watch.judged) == sorted(IDS)
    assert all((session.folder.cell(cell_id) / "output.log").is_file() for cell_id in IDS if cell_id != IDS[1])


def test_the_gpus_of_a_cell_are_reserved_together(nodes, tmp_path):
    report, _, _ = run_on_ray(tmp_path, cells=CELLS[:1], request=Request(cpus=1, gpus=2))
    assert report.verdict is Verdict.OK
    assert (tmp_path / "log").read_text().splitlines()[0] == f"begun {IDS[0]} 0,1"


def driver(folder):
    return subprocess.Popen([sys.executable, DRIVER, folder], stderr=subprocess.PIPE, text=True)


def results(folder):
    return {
        path.parent.name: path.read_bytes()
        for path in folder.glob("project/reports/*/cells/*/result.json")
        if path.with_suffix(".sha256").exists()
    }


def test_a_killed_driver_is_resumed_and_what_was_judged_stays(nodes, tmp_path):
    orders = {cell_id: {"seconds": 0.5} for cell_id in IDS} | {IDS[-1]: {"seconds": 5.0}, IDS[0]: {"fails": True}}
    stubs.stub_project(tmp_path, orders)
    process = driver(tmp_path)
    until(lambda: len(results(tmp_path)) >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = results(tmp_path)
    assert 2 <= len(before) < len(IDS)
    report, _, watch = run_on_ray(tmp_path, resume=True)
    after = results(tmp_path)
    assert {cell_id: after[cell_id] for cell_id in before} == before
    assert not set(watch.nodes) & set(before)
    assert len(list((tmp_path / "project" / "reports").iterdir())) == 1
    assert [cell.id for cell in report.cells] == IDS
    assert verdicts(report) == verdicts(local(tmp_path, orders))


def test_an_interrupted_driver_ends_the_cells(nodes, tmp_path):
    stubs.stub_project(tmp_path, {cell_id: {"seconds": 30.0} for cell_id in IDS})
    process = driver(tmp_path)
    until(lambda: (tmp_path / "log").exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors
    assert results(tmp_path) == {}
    assert stubs.ended_cells(tmp_path / "project") == []


def test_a_node_that_is_lost_in_mid_run_costs_no_cell_and_is_nobodys_failure(nodes, tmp_path):
    orders = {cell_id: {"seconds": 1.5} for cell_id in IDS} | {IDS[0]: {"fails": True, "seconds": 0.0}}
    watch = Watch()
    victim = nodes.list_all_nodes()[-1]
    lost = victim.node_id[:8]

    def kill():
        until(lambda: lost in watch.nodes.values())
        nodes.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    report, _, _ = run_on_ray(tmp_path, orders, watch=watch)
    killer.join()
    assert verdicts(report) == verdicts(local(tmp_path, orders))
    retried = [cell.id for cell in report.cells if any(finding.kind == "tried-again" for finding in cell.findings)]
    assert retried
    assert sorted(watch.judged) == sorted(IDS)
    assert set(stubs.ended_cells(tmp_path / "project")) == set(IDS)


def test_no_cluster_is_a_typed_error(tmp_path):
    stubs.stub_project(tmp_path)
    session = stubs.stub_session(tmp_path / "project", CELLS)
    for address, what in [("ray://127.0.0.1:1", "client address"), ("127.0.0.1:1", "no Ray cluster")]:
        with pytest.raises(ClusterError, match=what):
            execute(session, Recorder(), ClusterExecutor(RayCluster(address=address)))
