"""Other projects' packages that are judged as they are published: which one, and how it gets into a cell.

A peer is pinned by version and hash, and comes without its dependencies: what its adapter needs of it stands by itself,
and what it would bring along (Ray, trainers, another torch) must not be in a judged environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["PEERS", "PEERS_FOLDER", "Peer", "peer_in_cpu_cells"]

PEERS_FOLDER = "peers"


@dataclass(frozen=True)
class Peer:
    """One published package as a subject.

    Attributes:
        distribution: its name on the index, and that of the module which the suite must be seen to import.
        version: the one judged.
        filename: of its wheel.
        sha256: of its wheel.
        lanes: where it can run.
        elsewhere: why it cannot run in the other lanes; one sentence.
        source: what an installer is asked for in CPU cells, where the kernel is replaced by torch; "": the wheel above.
        checkout: the folder that the source is built from, if it is one.
    """

    distribution: str
    version: str
    filename: str
    sha256: str
    lanes: frozenset[str]
    elsewhere: str
    source: str = ""
    checkout: Path | None = None

    @property
    def requirement(self) -> str:
        """What an installer is asked for, hash included."""
        return f"{self.distribution}=={self.version} --hash=sha256:{self.sha256}"


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "verl": Peer(
            distribution="verl",
            version="0.9.1",
            filename="verl-0.9.1-py3-none-any.whl",
            sha256="db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
            lanes=frozenset({"gpu"}),
            elsewhere="verl's fused forward is a Triton kernel that needs a GPU: a CPU cell can judge nothing of it.",
        )
    }
)


def peer_in_cpu_cells(name: str, version: str | None, checkout: Path | None) -> Peer:
    """A published version or a checkout of a known package, for CPU cells: its kernel is replaced by torch there.

    Args:
        name: of the package, one of :data:`PEERS`.
        version: on the index; None for a checkout.
        checkout: its folder; None for a published version.
    """
    label = version if version is not None else "of a checkout"
    source = f"{name}=={version}" if version is not None else ""
    known = PEERS[name]
    return Peer(known.distribution, label, "", "", frozenset({"cpu"}), known.elsewhere, source, checkout)
