"""Make Megatron's few ``torch.cuda`` calls answer on a host without a GPU; no fused-forward code is touched."""

import contextlib

import torch


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, *args): ...
    def wait_event(self, *args): ...
    def synchronize(self): ...

    def record_event(self, event=None):
        return event or _Event()


class _Event:
    """An event that has already happened."""

    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...


def install_cpu_seam() -> None:
    """Replace device queries, random state and streams; does nothing where a GPU is present."""
    if torch.cuda.is_available():
        return
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Event = _Event
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # tied pipeline stages move their copy of the embedding
