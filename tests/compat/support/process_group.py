"""Process groups of a cell: one gloo (CPU) or NCCL (GPU) rank, or several spawned ones."""

from datetime import timedelta
from pathlib import Path

import torch


def start(
    rank: int, world: int, meeting: Path | None, *, tp: int = 1, pp: int = 1, cp: int = 1, vpp: int | None = None
) -> None:
    """Join the process group and lay Megatron's parallel state over it.

    Ranks meet through the file ``meeting``, which must not exist before: a port that is free when it is looked up
    may be taken by another cell's ranks a moment later. It must stay as long as the group does, since NCCL meets at
    each group's first collective. None is for one rank, which meets itself in memory.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    place = {"store": torch.distributed.HashStore()} if meeting is None else {"init_method": meeting.as_uri()}
    torch.distributed.init_process_group(backend, **place, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    model_parallel_cuda_manual_seed(0)


def stop() -> None:
    """Leave the process group, so that nothing is printed at exit."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
