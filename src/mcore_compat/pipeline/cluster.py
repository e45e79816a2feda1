"""Runs cells on the nodes of a cluster: what is asked for, what is lost and tried again, and what comes back.

Which cluster it is, is not known here (:mod:`mcore_compat.pipeline.ray_cluster` is one). A lost worker or node says
nothing about the subject: its cell is tried elsewhere, and is ``infra`` in the end at worst.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from mcore_compat.judge.cell import failed_cell
from mcore_compat.judge.criteria import found
from mcore_compat.matrix.cells import Cell
from mcore_compat.pipeline.delivery import Delivery, receive
from mcore_compat.pipeline.executors import CellWork
from mcore_compat.pipeline.parcel import pack
from mcore_compat.results import CellResult, Finding
from mcore_compat.verdicts import Verdict

__all__ = ["ATTEMPTS", "Cluster", "ClusterExecutor", "Ended", "Loss", "Nodes", "Request", "after_losses", "request_of"]

# A cell whose worker or node is lost so often is not tried again.
ATTEMPTS = 3
_POLL_S = 0.5
_NPROC = "MCORE_COMPAT_NPROC"


@dataclass(frozen=True)
class Request:
    """What one cell needs of a node.

    Attributes:
        cpus: logical cores.
        gpus: GPUs of one node; None: one for a cell of the GPU lane, or one for each of its ranks.
        memory: bytes; 0: no request.
        resources: amounts of the cluster's own resources by name.
    """

    cpus: float = 1.0
    gpus: float | None = None
    memory: int = 0
    resources: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU"]
        parts += [f"{self.gpus:g} GPU"] if self.gpus else []
        parts += [f"{self.memory} bytes of memory"] if self.memory else []
        parts += [f"{amount:g} {name}" for name, amount in self.resources]
        return ", ".join(parts)


def request_of(cell: Cell, usual: Request) -> Request:
    """The request of a cell: the usual one, with the GPUs that its lane and its ranks need."""
    if usual.gpus is not None:
        return usual
    ranks = next((int(variable.value) for variable in cell.env if variable.name == _NPROC), 1)
    return replace(usual, gpus=float(ranks) if cell.lane == "gpu" else 0.0)


@dataclass(frozen=True)
class Loss:
    """An attempt that ended with its worker.

    Attributes:
        kind: the worker process ended, or the whole node is gone.
        node: short name of the node; "" if it never started.
        detail: the cluster's words.
    """

    kind: Literal["worker", "node"]
    node: str
    detail: str = ""

    def __str__(self) -> str:
        where = f" on node {self.node}" if self.node else ""
        return f"worker killed{where}" if self.kind == "worker" else f"node {self.node or 'unknown'} lost"


@dataclass(frozen=True)
class Ended:
    """A task that has ended.

    Attributes:
        cell_id: the cell.
        outcome: its delivery; how it was lost; what the node said it cannot do; None: cancelled.
    """

    cell_id: str
    outcome: Delivery | Loss | str | None


class Nodes(Protocol):
    """An open connection to a cluster."""

    def submit(self, cell_id: str, request: Request, avoid: Sequence[str]) -> None:
        """Start a task for the cell, on another node than ``avoid`` where there is one."""

    def ended(self, timeout_s: float) -> Sequence[Ended]:
        """The tasks that have ended since the last call; waits for one."""

    def said(self) -> Sequence[tuple[str, str | int]]:
        """What tasks have said since the last call: the cell, and a phase or a number of cases."""

    def fits(self, request: Request) -> bool:
        """Whether a node that is alive has what is asked for, busy or not."""

    def cancel(self) -> None:
        """End all tasks, and wait until they have ended."""


class Cluster(Protocol):
    """A cluster that can be connected to."""

    def open(self, wheel: bytes, wheel_digest: str, parcel: bytes) -> AbstractContextManager[Nodes]:
        """Connect, and make the wheel (the harness's own code) and the parcel available to all nodes."""


@dataclass(frozen=True)
class ClusterExecutor:
    """Cells as tasks of a cluster, one task a cell.

    Attributes:
        cluster: where.
        request: what a cell needs unless its lane says more.
        patience_s: how long a cell waits for a node that fits while the cluster has none.
        clock: seconds; a test gives another.
    """

    cluster: Cluster
    request: Request = Request()
    patience_s: float = 600.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def run(self, cells: Sequence[Cell], work: CellWork, on_result: Callable[[CellResult], None]) -> None:
        """See :class:`~mcore_compat.pipeline.executors.Executor`."""
        if not cells:
            return
        parcel = pack(work.session)
        with self.cluster.open(parcel.wheel, parcel.lane.wheel.sha256, pickle.dumps(parcel)) as nodes:
            try:
                _Dispatch(self, nodes, work, on_result, {cell.id: cell for cell in cells}).run()
            except BaseException:
                nodes.cancel()
                raise


@dataclass
class _Dispatch:
    """The cells of one run, until all have a result."""

    executor: ClusterExecutor
    nodes: Nodes
    work: CellWork
    on_result: Callable[[CellResult], None]
    waiting: dict[str, Cell]
    losses: dict[str, tuple[Loss, ...]] = field(default_factory=dict)
    unfit_since: dict[Request, float] = field(default_factory=dict)

    def run(self) -> None:
        for cell in self.waiting.values():
            self._submit(cell)
        while self.waiting:
            for ended in self.nodes.ended(_POLL_S):
                self._ended(ended)
            for cell_id, text in self.nodes.said():
                self._say(cell_id, text)
            self._give_up_on_what_fits_nowhere()

    def _submit(self, cell: Cell) -> None:
        lost_on = tuple(loss.node for loss in self.losses.get(cell.id, ()) if loss.node)
        self.nodes.submit(cell.id, request_of(cell, self.executor.request), lost_on)

    def _say(self, cell_id: str, text: str | int) -> None:
        if cell_id not in self.waiting:
            return
        if isinstance(text, int):
            self.work.display.cases(cell_id, text)
        else:
            self.work.display.phase(cell_id, text)

    def _ended(self, ended: Ended) -> None:
        cell = self.waiting.get(ended.cell_id)
        if cell is None:
            return
        outcome = ended.outcome
        if isinstance(outcome, Delivery):
            self._finish(cell, receive(self.work.session, cell.id, _with_notes(outcome, self._losses(cell))))
        elif isinstance(outcome, Loss):
            self.losses[cell.id] = (*self._losses(cell), outcome)
            result = after_losses(cell, self.losses[cell.id])
            if result is not None:
                self._keep(cell, result)
            else:
                self.work.display.phase(cell.id, f"{outcome}; tried again elsewhere")
                self._submit(cell)
        elif outcome is None:
            self._keep(
                cell, _infra(cell, "task-cancelled", "the cell's task was cancelled by the cluster", "Run again.")
            )
        else:
            step = "Install `mcore-compat[harness,ray]` of this version on every node, and look at the node's disk."
            self._keep(cell, _infra(cell, "node-error", f"the node could not judge the cell: {outcome}", step))

    def _give_up_on_what_fits_nowhere(self) -> None:
        now = self.executor.clock()
        requests = {cell_id: request_of(cell, self.executor.request) for cell_id, cell in self.waiting.items()}
        unfit = {request for request in set(requests.values()) if not self.nodes.fits(request)}
        self.unfit_since = {request: self.unfit_since.get(request, now) for request in unfit}
        given_up = {request for request, since in self.unfit_since.items() if now - since >= self.executor.patience_s}
        for cell_id, request in requests.items():
            if request in given_up:
                step = "Add such a node, or ask for less with the --ray options."
                self._keep(
                    self.waiting[cell_id],
                    _infra(self.waiting[cell_id], "no-node", f"no node of the cluster has {request}", step),
                )

    def _keep(self, cell: Cell, result: CellResult) -> None:
        self._finish(cell, self.work.session.folder.save_result(result))

    def _finish(self, cell: Cell, written: CellResult) -> None:
        del self.waiting[cell.id]
        self.work.display.done(written)
        self.on_result(written)

    def _losses(self, cell: Cell) -> tuple[Loss, ...]:
        return self.losses.get(cell.id, ())


def after_losses(cell: Cell, losses: Sequence[Loss]) -> CellResult | None:
    """The result of a cell whose attempts were lost; None: it is tried again.

    It is never a failure of the subject: nothing that the suite did was seen.
    """
    if len(losses) < ATTEMPTS:
        return None
    what = "; ".join(str(loss) for loss in losses)
    if all(loss.kind == "worker" for loss in losses):
        message = f"the cell killed its worker process {len(losses)} times: {what}"
        details = "\n".join(dict.fromkeys(loss.detail for loss in losses if loss.detail))
        step = "Look at the memory of the nodes and at the kernel's log; run the cell alone with --executor local."
        return _infra(cell, "worker-killed", f"{message}\n{details}".strip(), step)
    return _infra(cell, "worker-lost", f"the cell was lost {len(losses)} times: {what}", "Run it again.")


def _infra(cell: Cell, kind: str, message: str, next_step: str) -> CellResult:
    result = failed_cell(cell, Verdict.INFRA, kind, message)
    return result.model_copy(update={"findings": (found(Verdict.INFRA, kind, message, next_step),)})


def _with_notes(delivery: Delivery, losses: Sequence[Loss]) -> Delivery:
    """The delivery with a note of the attempts that were lost before; it does not count against the cell."""
    if not losses:
        return delivery
    result = CellResult.model_validate_json(delivery.result)
    what = "; ".join(str(loss) for loss in losses)
    note = Finding(kind="tried-again", message=f"judged after {len(losses)} lost attempts: {what}", next_step="None.")
    noted = result.model_copy(update={"findings": (*result.findings, note)})
    return replace(delivery, result=noted.model_dump_json())
