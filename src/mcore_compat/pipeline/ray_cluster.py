"""A Ray cluster: one task for each cell, with the resources that the cell needs. Needs the extra ``ray``."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_compat.errors import InfrastructureError, MissingToolError
from mcore_compat.pipeline.cluster import Ended, Loss, Nodes, Request
from mcore_compat.pipeline.delivery import Delivery

__all__ = ["ClusterError", "RayCluster"]

_ADDRESS = "RAY_ADDRESS"
# A cell ends its processes in three seconds, its supervisor in thirty.
_CANCEL_S = 40.0
_NODE_NAME = 8
_REACH_S = 10.0
_STARTED = "started on node "


class ClusterError(InfrastructureError):
    """There is no cluster, or it cannot be used from here."""


@dataclass(frozen=True)
class RayCluster:
    """A running Ray cluster.

    Attributes:
        store: folder for environments on every node; None: the user's cache folder of the node.
        address: of the cluster; None: ``RAY_ADDRESS``, or the one that runs on this machine.
    """

    store: Path | None = None
    address: str | None = None

    @contextlib.contextmanager
    def open(self, wheel: bytes, wheel_digest: str, parcel: bytes) -> Iterator[Nodes]:
        """See :class:`~mcore_compat.pipeline.cluster.Cluster`.

        Raises:
            MissingToolError: the extra ``ray`` is not installed.
            ClusterError: there is no cluster, or its Ray or Python is another version.
        """
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        try:
            yield _RayNodes(ray, self.store, ray.put(wheel), wheel_digest, ray.put(parcel))
        finally:
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        address = self.address or os.environ.get(_ADDRESS) or "auto"
        if address.startswith("ray://"):
            raise ClusterError(
                "A Ray client address (ray://) is not supported.",
                f"Run on a node of the cluster, with {_ADDRESS}=auto; for example with `ray job submit`.",
            )
        previous = signal.getsignal(signal.SIGTERM)
        try:
            _reach(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except OSError as exc:
            raise ClusterError(
                f"There is no Ray cluster at {address}.",
                f"Start one with `ray start --head`, or set {_ADDRESS} to host:port of a cluster.",
            ) from exc
        except RuntimeError as exc:
            raise ClusterError(
                f"The Ray cluster cannot be used: {exc}.", "Use its versions of Ray and Python."
            ) from exc
        finally:
            with contextlib.suppress(ValueError):  # only the main thread has handlers
                signal.signal(signal.SIGTERM, previous)


def _reach(address: str) -> None:
    """Open and close a connection; Ray itself tries for minutes where nothing listens.

    Raises:
        OSError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as exc:
        raise MissingToolError(
            "The Ray executor needs the package ray.", "Install the extra: `pip install 'mcore-compat[ray]'`."
        ) from exc


@dataclass
class _RayNodes:
    """See :class:`~mcore_compat.pipeline.cluster.Nodes`."""

    ray: Any
    store: Path | None
    wheel: Any
    wheel_digest: str
    parcel: Any
    tasks: dict[Any, str] = field(default_factory=dict)
    groups: dict[Any, Any] = field(default_factory=dict)
    running_on: dict[str, str] = field(default_factory=dict)
    spoken: list[tuple[str, str | int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._log = _log_actor(self.ray)
        self._task = self.ray.remote(_task_body())

    def submit(self, cell_id: str, request: Request, avoid: Sequence[str]) -> None:
        options: dict[str, Any] = {"max_retries": 0, "name": f"cell {cell_id}", **_resources(request)}
        group = None
        if (request.gpus or 0) > 1:
            group, options["scheduling_strategy"] = self._reserved(options)
        elif avoid:
            options |= self._elsewhere(cell_id, request, avoid)
        store = str(self.store) if self.store is not None else None
        task = self._task.options(**options).remote(
            self.wheel, self.wheel_digest, self.parcel, cell_id, store, self._log
        )
        self.tasks[task] = cell_id
        self.running_on.pop(cell_id, None)
        if group is not None:
            self.groups[task] = group

    def ended(self, timeout_s: float) -> Sequence[Ended]:
        if not self.tasks:
            time.sleep(timeout_s)
            return ()
        waiting = list(self.tasks)
        if not self.ray.wait(waiting, num_returns=1, timeout=timeout_s, fetch_local=False)[0]:
            return ()
        ready, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        self._listen()
        return [Ended(self.tasks[task], self._outcome(task)) for task in ready]

    def said(self) -> Sequence[tuple[str, str | int]]:
        self._listen()
        said, self.spoken = self.spoken, []
        return said

    def fits(self, request: Request) -> bool:
        return bool(self._fitting(request))

    def _fitting(self, request: Request) -> list[dict[str, Any]]:
        """The nodes that are alive and have what is asked for, busy or not."""
        wanted = {"CPU": request.cpus, "GPU": request.gpus or 0.0, "memory": float(request.memory)}
        wanted |= dict(request.resources)
        return [
            node
            for node in self.ray.nodes()
            if node["Alive"]
            and all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items() if amount)
        ]

    def cancel(self) -> None:
        for task in self.tasks:
            self.ray.cancel(task, force=False)
        left = list(self.tasks)
        if left:
            _, left = self.ray.wait(left, num_returns=len(left), timeout=_CANCEL_S, fetch_local=False)
        for task in left:
            self.ray.cancel(task, force=True)
        for group in self.groups.values():
            self.ray.util.remove_placement_group(group)

    def _outcome(self, task: Any) -> Delivery | Loss | str | None:
        errors = self.ray.exceptions
        node = self.running_on.get(self.tasks.pop(task), "")
        if (group := self.groups.pop(task, None)) is not None:
            self.ray.util.remove_placement_group(group)
        try:
            answer = self.ray.get(task)
        except errors.TaskCancelledError:
            return None
        except errors.RayTaskError as exc:
            return str(exc).strip().splitlines()[-1]
        except errors.NodeDiedError as exc:
            return Loss("node", node, _first_line(exc))
        except errors.RayError as exc:
            alive = {known["NodeID"][:_NODE_NAME] for known in self.ray.nodes() if known["Alive"]}
            # The worker crashed or was killed, or its object is lost with its node.
            return Loss("worker" if not node or node in alive else "node", node, _first_line(exc))
        return None if answer is None else Delivery(*answer)

    def _listen(self) -> None:
        """Take what tasks have said; a log whose node is lost costs the progress of a moment, and no cell."""
        try:
            said = self.ray.get(self._log.take.remote(), timeout=5.0)
        except (self.ray.exceptions.RayError, self.ray.exceptions.GetTimeoutError):
            return
        for cell_id, text in said:
            if isinstance(text, str) and text.startswith(_STARTED):
                self.running_on[cell_id] = text.removeprefix(_STARTED)
            self.spoken.append((cell_id, text))

    def _elsewhere(self, cell_id: str, request: Request, avoid: Sequence[str]) -> dict[str, Any]:
        """The strategy for a node that the cell was not lost on; empty: there is none, so any will do."""
        fitting = [node["NodeID"] for node in self._fitting(request)]
        others = sorted(name for name in fitting if name[:_NODE_NAME] not in avoid)
        if not others:
            return {}
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        chosen = others[zlib.crc32(cell_id.encode()) % len(others)]
        return {"scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(chosen, soft=True)}

    def _reserved(self, options: dict[str, Any]) -> tuple[Any, Any]:
        """A placement group of one bundle: all GPUs of the cell on one node, at once or not at all."""
        bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options.get("resources", {})}
        bundle |= {"memory": options["memory"]} if "memory" in options else {}
        group = self.ray.util.placement_group([bundle], strategy="STRICT_PACK")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        return group, strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)


def _resources(request: Request) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus or 0}
    options |= {"memory": request.memory} if request.memory else {}
    options |= {"resources": dict(request.resources)} if request.resources else {}
    return options


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def _log_actor(ray: Any) -> Any:
    """What tasks say, on the caller's own node."""

    class Log:
        def __init__(self) -> None:
            self.lines: list[tuple[str, str | int]] = []

        def add(self, cell_id: str, text: str | int) -> None:
            self.lines.append((cell_id, text))

        def take(self) -> list[tuple[str, str | int]]:
            taken, self.lines = self.lines, []
            return taken

    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(Log).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


def _task_body() -> Any:
    """The function that a worker runs.

    It is sent by value and imports the harness from the caller's wheel, so that every node judges with the same code.
    """

    def judge(wheel: bytes, digest: str, parcel: bytes, cell_id: str, store: str | None, log: Any) -> Any:
        import contextlib
        import io
        import os
        import secrets
        import sys
        import zipfile
        from pathlib import Path

        import ray

        node = ray.get_runtime_context().get_node_id()
        log.add.remote(cell_id, "started on node " + node[:8])
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        kept = Path(store) if store is not None else Path(cache, "mcore-compat")
        code = kept / "harness" / digest[:32]
        if not code.is_dir():
            code.parent.mkdir(parents=True, exist_ok=True)
            fresh = code.with_name("." + secrets.token_hex(8))
            with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
                archive.extractall(fresh)
            with contextlib.suppress(OSError):  # another task of this node was faster
                fresh.rename(code)
        if sys.path[0] != str(code):
            sys.path.insert(0, str(code))
        for name in [name for name in sys.modules if name.partition(".")[0] == "mcore_compat"]:
            if not str(getattr(sys.modules[name], "__file__", "")).startswith(str(code)):
                del sys.modules[name]
        from mcore_compat.pipeline.node import judge_on_node

        judged = judge_on_node(parcel, cell_id, kept, lambda text: log.add.remote(cell_id, text))
        return None if judged is None else (judged.result, dict(judged.files))

    return judge
