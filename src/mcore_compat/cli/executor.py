"""Options that say where cells run: on this machine, or on a Ray cluster with what each cell needs of a node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypedDict, Unpack

import typer

from mcore_compat.errors import UsageError
from mcore_compat.pipeline.cluster import ClusterExecutor, Request
from mcore_compat.pipeline.executors import Executor, LocalThreads
from mcore_compat.pipeline.ray_cluster import RayCluster

__all__ = [
    "WAIT_S",
    "ExecutorName",
    "NodeCache",
    "Placement",
    "RayCpus",
    "RayGpus",
    "RayMemory",
    "RayResources",
    "RayWait",
    "Where",
    "choose_executor",
    "executor_words",
]

_MEMORY = re.compile(r"(\d+)\s*([KMGT]?)(i?)B?")
_RESOURCE = re.compile(r"([A-Za-z][\w.-]*)=(\d+(?:\.\d+)?)")
_POWERS = " KMGT"
WAIT_S = 600.0


class Placement(TypedDict):
    """What each cell needs of a node, as typed."""

    cpus: float
    gpus: float | None
    memory: str | None
    resources: Sequence[str] | None
    wait_s: float
    node_cache: Path | None


class ExecutorName(StrEnum):
    """Where cells run."""

    LOCAL = "local"
    RAY = "ray"


Where = Annotated[
    ExecutorName, typer.Option("--executor", help="local: this machine; ray: RAY_ADDRESS or the cluster running here.")
]
RayCpus = Annotated[float, typer.Option("--ray-cpus", min=0.0, help="CPUs that each cell reserves on its node.")]
RayGpus = Annotated[
    float | None, typer.Option("--ray-gpus", min=0.0, help="GPUs per cell; default: what its lane and ranks need.")
]
RayMemory = Annotated[str | None, typer.Option("--ray-memory", help="Memory per cell, for example 8GiB.")]
RayResources = Annotated[
    list[str] | None, typer.Option("--ray-resource", help="Custom resource per cell, NAME=AMOUNT; repeatable.")
]
RayWait = Annotated[
    float, typer.Option("--ray-wait", min=0.0, help="Seconds to wait for a node that fits while there is none.")
]
NodeCache = Annotated[
    Path | None,
    typer.Option("--node-cache", help="Folder for environments on each node; default: ~/.cache/mcore-compat."),
]


def choose_executor(where: ExecutorName, jobs: int, **place: Unpack[Placement]) -> Executor:
    """The executor that the options name; a cluster is connected to when the first cell starts.

    Raises:
        UsageError: an amount is not written as one.
    """
    if where is ExecutorName.LOCAL:
        return LocalThreads(jobs)
    memory = _bytes(text) if (text := place["memory"]) else 0
    request = Request(place["cpus"], place["gpus"], memory, tuple(map(_resource, place["resources"] or ())))
    return ClusterExecutor(RayCluster(place["node_cache"]), request, place["wait_s"])


def executor_words(where: ExecutorName, **place: Unpack[Placement]) -> list[str]:
    """The options that name this executor, as somebody types them."""
    if where is ExecutorName.LOCAL:
        return []
    options = {
        "--ray-cpus": f"{place['cpus']:g}" if place["cpus"] != 1.0 else None,
        "--ray-gpus": f"{place['gpus']:g}" if place["gpus"] is not None else None,
        "--ray-memory": place["memory"],
        "--ray-wait": f"{place['wait_s']:g}" if place["wait_s"] != WAIT_S else None,
        "--node-cache": place["node_cache"],
    }
    words = [f"{name} {value}" for name, value in options.items() if value is not None]
    return ["--executor ray", *words, *(f"--ray-resource {resource}" for resource in place["resources"] or ())]


def _bytes(text: str) -> int:
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise UsageError(f"`{text}` is not an amount of memory.", "Write it as 8GiB, 500MB or a number of bytes.")
    number, power, binary = match.groups()
    base = 1024 if binary else 1000
    return int(int(number) * base ** _POWERS.index(power or " "))


def _resource(text: str) -> tuple[str, float]:
    match = _RESOURCE.fullmatch(text)
    if match is None:
        raise UsageError(f"`{text}` is not a resource.", "Write it as NAME=AMOUNT, for example H200=1.")
    return match.group(1), float(match.group(2))
