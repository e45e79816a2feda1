"""Run one function on several ranks: gloo processes on a CPU host, NCCL ones where every rank has a GPU.

Ranks are forked from a server that has imported torch and Megatron and done nothing else; forking the test
process itself would inherit its process group and its autograd threads.
"""

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

import torch

from . import process_group

_TIMEOUT = 120


def _main(job, arguments, rank, layout, directory):
    os.environ["MCORE_COMPAT_RANK"] = str(rank)
    result = Path(directory) / f"{rank}.pt"
    try:
        torch.set_num_threads(1)
        others = {name: size for name, size in layout.items() if name != "world"}
        process_group.start(rank, layout["world"], Path(directory) / "meeting", **others)
        value = job(*arguments)
        torch.distributed.barrier()
        process_group.stop()
    except BaseException:
        (Path(directory) / f"{rank}.error").write_text(traceback.format_exc())
        raise
    torch.save(value, result)


def _context():
    context = multiprocessing.get_context("forkserver")
    here = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    if here not in path.split(os.pathsep):  # the server does not inherit sys.path on Python 3.12
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, path]))
    context.set_forkserver_preload(["support.preload"])
    return context


def run_ranks(job, *arguments, world=1, **layout):
    """Results of ``job(*arguments)`` of every rank, in rank order.

    ``layout`` goes to :func:`process_group.start` (tp, pp, cp, vpp). A rank that fails or hangs fails the test
    with its own traceback.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=_main, args=(job, arguments, rank, {"world": world, **layout}, directory))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_TIMEOUT)
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
        assert not hung, f"ranks {hung} did not end within {_TIMEOUT} s"
        return [torch.load(Path(directory) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _last(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no traceback"
