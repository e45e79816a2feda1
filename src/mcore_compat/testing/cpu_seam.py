"""Make Megatron's few ``torch.cuda`` calls answer on a host without a GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["install_cpu_seam"]


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


def install_cpu_seam() -> None:
    """Replace torch's device queries, random state and streams by CPU ones, for the rest of the process.

    Call it before Megatron is imported, which reads the device at import time. Does nothing on a host with a GPU.
    """
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.Event = _Event
    # torch keeps what is to run once CUDA is initialised, with a formatted traceback (10 ms); here that never comes.
    for module in (cuda, cuda.random):
        setattr(module, "_lazy_call", lambda *_, **__: None)  # noqa: B010 - a private name, replaced and never called
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    tensor.cuda = lambda self, *_, **__: self  # tied pipeline stages move their copy of the embedding
