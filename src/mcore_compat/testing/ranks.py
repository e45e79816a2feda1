"""Run one function on several ranks: gloo processes on a CPU host, NCCL ones on GPUs.

Ranks are forked from a server that has imported torch and Megatron and done nothing else. Forking the test process
itself would inherit its process group and its autograd threads.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_compat.testing import process_groups

__all__ = ["preload_in_ranks", "run_ranks"]

_TIMEOUT_S = 120
_PRELOAD = "mcore_compat.testing.preload"
# What the server is to import besides, and from where: it is a new interpreter and sees the environment alone.
RANK_MODULES = "MCORE_COMPAT_RANK_MODULES"
RANK_PATH = "MCORE_COMPAT_RANK_PATH"


def preload_in_ranks(*modules: str) -> None:
    """Have the server of ranks import these modules once, beside torch and Megatron, so that no rank imports them.

    Call it before the first :func:`run_ranks`; the server is started by that call and keeps what it has.

    Args:
        *modules: dotted names, found on this process's ``sys.path``. One that cannot be imported is left to the rank
            that needs it, which then reports the error.
    """
    os.environ[RANK_MODULES] = ",".join(modules)
    os.environ[RANK_PATH] = os.pathsep.join(filter(None, sys.path))


def run_ranks(job: Callable[..., Any], *arguments: Any, world: int = 1, **layout: int) -> list[Any]:
    """Run ``job(*arguments)`` on every rank, inside a process group with Megatron's parallel state.

    Args:
        job: a module-level function; it and its arguments must be picklable.
        *arguments: its arguments.
        world: number of ranks.
        **layout: tp, pp, cp, ep and vpp, see :func:`mcore_compat.testing.process_groups.lay_out`.

    Returns:
        The results in rank order, loaded with ``torch.load``.

    Raises:
        AssertionError: a rank failed or did not end within two minutes; the message has its traceback.
    """
    _end_server_at_exit()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=_main, args=(job, arguments, rank, {"world": world, **layout}, directory))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_TIMEOUT_S)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        ended = {str(rank): process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
        for process in ranks:
            process.kill()
            process.join()
        errors = {file.stem: file.read_text() for file in sorted(Path(directory).glob("*.error"))}
        # A rank that was killed (by the host, for memory) leaves no traceback, and the others blame the connection.
        errors = {
            rank: f"ended with exit status {code} and no traceback"
            for rank, code in ended.items()
            if rank not in errors
        } | errors
        # The error first: reports show one line.
        assert not errors, "\n".join(f"rank {rank}: {_last(text)}\n{text}" for rank, text in errors.items())
        assert not hung, f"ranks {hung} did not end within {_TIMEOUT_S} s"
        return [torch.load(Path(directory) / f"{rank}.pt", weights_only=False) for rank in range(world)]


@functools.cache
def _end_server_at_exit() -> None:
    """Have the server end, and wait for it, before this process does.

    By itself it ends some time after its parent, for it has torch and Megatron to take down. Whoever supervises the
    parent would meet it as a process that was left behind. Python has no public name for this.
    """
    server: Any = multiprocessing.forkserver._forkserver  # noqa: SLF001
    atexit.register(server._stop)  # noqa: SLF001


def _main(
    job: Callable[..., Any], arguments: tuple[Any, ...], rank: int, layout: dict[str, Any], directory: str
) -> None:
    os.environ["MCORE_COMPAT_RANK"] = str(rank)
    try:
        torch.set_num_threads(1)
        others = {name: size for name, size in layout.items() if name != "world"}
        process_groups.start(rank, layout["world"], Path(directory) / "meeting", **others)
        value = job(*arguments)
        torch.distributed.barrier()
        process_groups.stop()
    except BaseException:
        (Path(directory) / f"{rank}.error").write_text(traceback.format_exc())
        raise
    torch.save(value, Path(directory) / f"{rank}.pt")


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no traceback"
