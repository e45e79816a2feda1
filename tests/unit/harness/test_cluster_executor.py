"""Cells on a cluster that loses workers and nodes: nothing is lost or doubled, and no loss is the subject's failure."""

import contextlib
import dataclasses
import os
import pickle
import platform
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import cluster_stubs as stubs
import harness_builders as build
import pytest
from harness_project import FakeLane, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_compat.errors import InfrastructureError, MissingToolError, UsageError
from mcore_compat.pipeline import lanes, ray_cluster
from mcore_compat.pipeline.cluster import (
    ATTEMPTS,
    ClusterExecutor,
    Ended,
    Loss,
    Request,
    after_losses,
    request_of,
)
from mcore_compat.pipeline.delivery import Delivery, receive
from mcore_compat.pipeline.execute import InterruptedRunError, execute
from mcore_compat.pipeline.lanes import ImageLane
from mcore_compat.pipeline.node import judge_on_node, with_host
from mcore_compat.pipeline.one_cell import LocalWork
from mcore_compat.pipeline.parcel import pack, unpack
from mcore_compat.pipeline.run_folder import newest_unfinished
from mcore_compat.provision.host_image import Image
from mcore_compat.provision.wheelhouse import Wheelhouse
from mcore_compat.verdicts import Verdict

CELLS = stubs.MATRIX.cells[-5:]
IDS = [cell.id for cell in CELLS]


@dataclass
class FakeNodes:
    """Nodes of this process; ``losses`` says how a cell's attempts end before one succeeds."""

    store: Path
    parcel: bytes
    losses: dict
    interrupt_after: int | None = None
    waiting: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    spoken: list = field(default_factory=list)
    delivered: int = 0
    cancelled: bool = False
    has_nodes: bool = True

    def submit(self, cell_id, request, avoid):
        self.asked.append((cell_id, request, tuple(avoid)))
        if self.has_nodes:
            self.waiting.append(cell_id)

    def ended(self, _timeout_s):
        if self.delivered == self.interrupt_after:
            raise KeyboardInterrupt
        ended, self.waiting = self.waiting[:1], self.waiting[1:]
        return [Ended(cell_id, self._outcome(cell_id)) for cell_id in ended]

    def _outcome(self, cell_id):
        if self.losses.get(cell_id):
            return self.losses[cell_id].pop(0)
        self.delivered += 1
        return judge_on_node(self.parcel, cell_id, self.store, lambda text: self.spoken.append((cell_id, text)))

    def said(self):
        said, self.spoken = self.spoken, []
        return said

    def fits(self, _request):
        return self.has_nodes

    def cancel(self):
        self.cancelled = True


@dataclass
class FakeCluster:
    store: Path
    losses: dict = field(default_factory=dict)
    changes: dict = field(default_factory=dict)
    nodes: FakeNodes | None = None

    @contextlib.contextmanager
    def open(self, wheel, _digest, parcel):
        assert wheel.startswith(b"PK")
        self.nodes = FakeNodes(self.store, parcel, {cell: list(losses) for cell, losses in self.losses.items()})
        for name, value in self.changes.items():
            setattr(self.nodes, name, value)
        yield self.nodes


def run_on(folder, losses=None, orders=None, clock=None, resume=False, **changes):
    """A run of the stub cells; returns its report, session and the cluster's nodes."""
    root = Path(folder) / "project"
    if not root.exists():
        stubs.stub_project(folder, orders)
    resumed = newest_unfinished(root / "reports", "run") if resume else None
    session = stubs.stub_session(root, CELLS, resumed)
    cluster = FakeCluster(Path(folder) / "store", losses or {}, changes)
    extra = {"clock": clock} if clock else {}
    try:
        report = execute(session, Recorder(), ClusterExecutor(cluster, **extra))
    finally:
        session.folder.alive.release()
    return report, session, cluster.nodes


def local(folder, orders=None):
    root = stubs.stub_project(Path(folder) / "local", orders)
    session = stubs.stub_session(root, CELLS)
    return execute(session, Recorder())


def comparable(report):
    """Everything but the run's name, its clock, and notes of lost attempts."""
    cells = [
        cell.model_copy(update={"findings": tuple(f for f in cell.findings if f.kind != "tried-again")})
        for cell in report.cells
    ]
    return [cell.model_dump() for cell in cells], report.verdict, report.planned, report.findings


def test_a_cluster_judges_as_this_machine_does(tmp_path):
    orders = {IDS[1]: {"fails": True}}
    report, session, _ = run_on(tmp_path, orders=orders)
    assert comparable(report) == comparable(local(tmp_path, orders))
    assert report.verdict is Verdict.BREAK
    for cell_id in IDS:
        assert session.folder.result(cell_id) is not None
        assert (session.folder.cell(cell_id) / "output.log").read_text() == f"output of {cell_id}\n"
        assert (session.folder.cell(cell_id) / "lock.txt").is_file()
    assert not list(session.folder.path.glob("cells/.*"))


LOSSES = st.lists(
    st.builds(Loss, st.sampled_from(["worker", "node"]), st.sampled_from(["aa", "bb", ""])), max_size=ATTEMPTS + 1
)


@given(losses=st.dictionaries(st.sampled_from(IDS), LOSSES))
@settings(max_examples=20, deadline=None)
def test_losses_never_lose_or_double_a_cell_and_are_never_a_failure(losses):
    with tempfile.TemporaryDirectory() as folder:
        report, _, nodes = run_on(folder, losses)
        assert [cell.id for cell in report.cells] == IDS
        ended = stubs.ended_cells(Path(folder) / "project")
        assert ended == sorted(cell_id for cell_id in IDS if len(losses.get(cell_id, ())) < ATTEMPTS)
        for cell in report.cells:
            lost = losses.get(cell.id, [])
            if len(lost) < ATTEMPTS:
                assert cell.verdict is Verdict.OK
                assert [f.kind for f in cell.findings] == ["tried-again"] * bool(lost)
            else:
                assert cell.verdict is Verdict.INFRA
            for number, (_, _, avoid) in enumerate(entry for entry in nodes.asked if entry[0] == cell.id):
                assert avoid == tuple(loss.node for loss in lost[:number] if loss.node)


def test_a_cell_that_kills_its_worker_three_times_is_reported_as_that():
    losses = [Loss("worker", node, "exit code 137") for node in ("aa", "bb", "cc")]
    assert after_losses(CELLS[0], losses[:2]) is None
    result = after_losses(CELLS[0], losses)
    assert result.verdict is Verdict.INFRA
    assert result.reason == (
        "the cell killed its worker process 3 times: worker killed on node aa; worker killed on node bb; "
        "worker killed on node cc"
    )
    assert [finding.kind for finding in result.findings] == ["worker-killed"]
    mixed = after_losses(CELLS[0], [*losses[:2], Loss("node", "cc")])
    assert [finding.kind for finding in mixed.findings] == ["worker-lost"]
    assert "node cc lost" in mixed.reason


def test_a_resumed_run_judges_what_is_missing_and_nothing_twice(tmp_path):
    with pytest.raises(InterruptedRunError, match="2 of 5 cells"):
        run_on(tmp_path, interrupt_after=2)
    report, _, nodes = run_on(tmp_path, resume=True)
    assert [cell_id for cell_id, *_ in nodes.asked] == IDS[2:]
    assert stubs.ended_cells(tmp_path / "project") == sorted(IDS)
    assert comparable(report) == comparable(local(tmp_path))


def test_an_interruption_ends_the_tasks(tmp_path):
    cluster = FakeCluster(tmp_path / "store", changes={"interrupt_after": 0})
    session = stubs.stub_session(stubs.stub_project(tmp_path), CELLS)
    with pytest.raises(InterruptedRunError):
        execute(session, Recorder(), ClusterExecutor(cluster))
    assert cluster.nodes.cancelled


def test_a_request_that_no_node_fits_is_given_up_after_a_while(tmp_path):
    seconds = iter(range(0, 10_000, 200))
    report, _, _ = run_on(tmp_path, clock=lambda: float(next(seconds)), has_nodes=False)
    assert {cell.verdict for cell in report.cells} == {Verdict.INFRA}
    assert report.cells[0].reason == "no node of the cluster has 1 CPU"


def test_what_a_node_cannot_do_is_infra(tmp_path):
    losses = {IDS[0]: ["ModuleNotFoundError: No module named 'pydantic'"], IDS[1]: [None]}
    report, _, _ = run_on(tmp_path, losses)
    assert [cell.verdict for cell in report.cells] == [Verdict.INFRA] * 2 + [Verdict.OK] * 3
    assert "pydantic" in report.cells[0].reason


def test_the_gpus_of_a_cell_are_those_of_its_lane_and_its_ranks():
    cpu = build.cell()
    gpu = build.cell(lane="gpu")
    reason = "set by the GPU lane"
    ranks = build.cell(lane="gpu", env=[{"name": "MCORE_COMPAT_NPROC", "value": "4", "reason": reason}])
    assert [request_of(cell, Request()).gpus for cell in (cpu, gpu, ranks)] == [0, 1, 4]
    assert request_of(ranks, Request(gpus=2)).gpus == 2
    asked = Request(2, 4, 1 << 30, (("H200", 1.0),))
    assert str(asked) == "2 CPU, 4 GPU, 1073741824 bytes of memory, 1 H200"


def test_the_result_of_another_cell_or_a_foreign_file_is_refused(tmp_path):
    session = stubs.stub_session(stubs.stub_project(tmp_path), CELLS)
    with pytest.raises(InfrastructureError, match="came back for cell"):
        receive(session, IDS[0], Delivery(build.result(IDS[1]).model_dump_json(), {}))
    for name in ("../x", "result.json"):
        with pytest.raises(InfrastructureError, match="a file named"):
            receive(session, IDS[0], Delivery(build.result(IDS[0]).model_dump_json(), {name: b""}))
    assert session.folder.result(IDS[0]) is None


def test_a_cell_that_is_judged_twice_ends_the_run(tmp_path):
    class Doubling:
        def run(self, cells, work, on_result):
            result = work(cells[0], threading.Event())
            on_result(result)
            on_result(result)

    with pytest.raises(InfrastructureError, match="judged twice"):
        execute(stubs.stub_session(stubs.stub_project(tmp_path), CELLS), Recorder(), Doubling())


def test_a_parcel_that_was_changed_on_its_way_is_refused(tmp_path):
    parcel = pack(stubs.stub_session(stubs.stub_project(tmp_path), CELLS))
    inputs = {**parcel.plan.inputs, "suite": "ab" * 32}
    other_suite = dataclasses.replace(parcel, plan=parcel.plan.model_copy(update={"inputs": inputs}))
    other_wheel = dataclasses.replace(parcel, wheel=b"x")
    for damaged, what in [(other_suite, "The suite did not arrive"), (other_wheel, "arrive as it was sent")]:
        with pytest.raises(InfrastructureError, match=what):
            unpack(damaged, IDS[0], tmp_path / "store", tmp_path / "work", {})


def test_local_wheels_travel_and_folders_do_not(tmp_path):
    root = stubs.stub_project(tmp_path)
    wheel = tmp_path / "megatron_core-0.18.2-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    cell = CELLS[0].model_copy(update={"id": "own", "source": str(wheel)})
    parcel = pack(stubs.stub_session(root, [cell]))
    wheel.unlink()
    arrived = unpack(parcel, "own", tmp_path / "store", tmp_path / "work", {}).cells[0]
    assert Path(arrived.source).read_bytes() == b"a wheel"
    folder = cell.model_copy(update={"source": f"megatron-core @ file://{tmp_path}"})
    with pytest.raises(UsageError, match="a folder of this machine"):
        pack(stubs.stub_session(root, [folder]))


def test_a_lane_of_this_machine_alone_is_refused(tmp_path):
    session = stubs.stub_session(stubs.stub_project(tmp_path), CELLS)
    object.__setattr__(session, "lane", FakeLane(session.project))
    with pytest.raises(UsageError, match="this machine only"):
        ClusterExecutor(FakeCluster(tmp_path)).run(CELLS, LocalWork(session, Recorder()), lambda _: None)


def test_without_ray_the_extra_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(ray_cluster.importlib, "import_module", missing)
    with (
        pytest.raises(MissingToolError, match="needs the package ray") as caught,
        ray_cluster.RayCluster().open(b"", "", b""),
    ):
        pass
    assert "mcore-compat[ray]" in caught.value.next_step


def test_the_image_lane_opens_on_a_node_with_its_bundle_and_the_node_s_image(tmp_path, monkeypatch):
    project = stubs.stub_session(stubs.stub_project(tmp_path), CELLS).project
    here = Image((tmp_path,), {"torch": "2.11.0"}, "aa", ())
    there = Image((tmp_path,), {"torch": "2.12.0"}, "bb", ("H200",))
    house = Wheelhouse(tmp_path / "bundle", "3.12", platform.machine(), (), (), {})
    wheel = stubs.stub_wheel(tmp_path / "wheel")
    lane = ImageLane(project, here, house, tmp_path / "farm", wheel, tmp_path / "work", os.environ)
    arrived = pickle.loads(pickle.dumps(lane.portable()))
    assert lane.shipped == {"bundle": tmp_path / "bundle"}
    monkeypatch.setattr(lanes, "read_image", lambda *_: there)
    monkeypatch.setattr(lanes, "link_farm", lambda image, house, folder, _peer: (image, house, folder))
    opened = arrived.on_node(project, wheel, {"PATH": "x"}, {"bundle": tmp_path / "arrived"}, tmp_path / "task")
    assert opened.image is there
    assert opened.house.folder == tmp_path / "arrived"
    assert opened.farm == (there, opened.house, tmp_path / "task" / "image")
    assert opened.environments == tmp_path / "task" / "cells"
    assert opened.adapted([build.cell()])[0].torch == "2.12.0"
    assert [finding.kind for finding in opened.host_findings()] == ["image", "image-unchanged"]


def test_a_node_whose_image_changed_makes_the_cell_infra():
    changed = build.finding("torch became another", kind="image-changed", verdict=Verdict.INFRA)
    note = build.finding("Host: x", kind="image", verdict=None)
    green = build.result()
    assert with_host(green, (note,)).verdict is Verdict.OK
    result = with_host(green, (note, changed))
    assert (result.verdict, result.reason) == (Verdict.INFRA, "torch became another")
    assert [finding.kind for finding in result.findings] == ["image-changed", "image"]
