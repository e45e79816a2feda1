"""Process-wide counts of fused forward executions: the evidence of which path ran.

The counters only ever grow; a reader takes a snapshot before and after what it watches and compares. Executions
are counted when the forward is issued, so a replayed CUDA graph does not count again.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

__all__ = ["KernelLaunches", "kernel_launches", "record_launch"]

_PATHS = ("torch", "triton", "gluon")
_lock = threading.Lock()
_counts: Counter[tuple[str, bool]] = Counter()


@dataclass(frozen=True)
class KernelLaunches:
    """How many fused forwards ran in this process, by path.

    Attributes:
        torch: chunked torch implementation.
        triton: plain Triton kernels, compiled for the device.
        gluon: warp-specialised Gluon kernels (Hopper).
        triton_interpreted: plain Triton kernels in Triton's CPU interpreter (``TRITON_INTERPRET=1``).
    """

    torch: int
    triton: int
    gluon: int
    triton_interpreted: int

    @property
    def total(self) -> int:
        """Fused forwards by any path."""
        return self.torch + self.triton + self.gluon + self.triton_interpreted


def record_launch(path: str, *, interpreted: bool = False) -> None:
    """Count one fused forward by ``path`` ("torch", "triton", "gluon")."""
    if path not in _PATHS:
        raise ValueError(f"unknown kernel path {path!r}")
    with _lock:
        _counts[path, interpreted] += 1


def kernel_launches() -> KernelLaunches:
    """Snapshot of the counters of this process."""
    with _lock:
        return KernelLaunches(
            torch=_counts["torch", False],
            triton=_counts["triton", False],
            gluon=_counts["gluon", False],
            triton_interpreted=_counts["triton", True],
        )
