"""Process groups for tests: one rank that meets itself, or one of several; gloo on a CPU host, NCCL on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

__all__ = ["process_group", "start", "stop"]

_TIMEOUT = timedelta(seconds=120)


def start(rank: int, world: int, meeting: Path | None, **layout: Any) -> None:
    """Join the default process group and initialise Megatron's parallel state.

    Args:
        rank: this process's rank.
        world: number of ranks.
        meeting: a file that does not exist yet and at which the ranks meet; None for one rank alone. A file rather
            than a port: a port that is free when it is looked up may be taken a moment later. The file must stay as
            long as the group does, because NCCL meets at each group's first collective.
        **layout: see :func:`lay_out`.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed: Any = torch.distributed
    place: dict[str, Any]
    place = {"store": distributed.HashStore()} if meeting is None else {"init_method": meeting.as_uri()}
    torch.distributed.init_process_group(backend, **place, rank=rank, world_size=world, timeout=_TIMEOUT)
    lay_out(**layout)


def lay_out(*, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, vpp: int | None = None) -> None:
    """Initialise Megatron's parallel state over the ranks, after dropping an earlier one.

    Args:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size; experts are not split over tensor-parallel ranks when it is above 1.
        vpp: virtual pipeline stages per rank.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    experts = {} if ep == 1 else {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vpp,
        **experts,
    )
    model_parallel_cuda_manual_seed(0)


def stop() -> None:
    """Leave the process group, so that nothing is printed at exit."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A process group of this process alone with Megatron's parallel state, for the duration of a block."""
    start(0, 1, None)
    try:
        yield
    finally:
        stop()
