"""One rank: started by torchrun, runs every job in order and saves what each returned, then its evidence."""

import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent), str(_HERE.parent.parent / "compat")]
_started = time.monotonic()

import torch  # noqa: E402

from mcore_compat.testing import process_groups  # noqa: E402
from mcore_compat.testing.cpu_seam import install_cpu_seam  # noqa: E402

install_cpu_seam()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rank_jobs
    from lane import faults
    from lane.paths import launches
    from megatron.core import parallel_state
    from support import facts
    from support.subjects import load_subject


def _forget_mtp_losses():
    """Upstream logs MTP losses into a class-wide tensor that the first model sizes."""
    try:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    except ImportError:
        return
    MTPLossLoggingHelper.tracker.clear()


def _deterministic():
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def main(out):
    """Run all jobs; a failure is written down and ends this rank, so that the others are not waited for in vain."""
    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=90))
    _deterministic()
    faults.plant(os.environ.get("MCORE_COMPAT_FAULT", ""))
    imports, laid = time.monotonic() - _started, None
    for name, (layout, function, arguments) in rank_jobs.jobs().items():
        try:
            if layout != laid:
                process_groups.lay_out(**layout)
                laid = layout
            _forget_mtp_losses()
            before = launches()
            result = function(*arguments)
            result["paths"] = sorted(path for path, count in launches().items() if count > before[path])
            torch.distributed.barrier()
        except BaseException:
            (out / f"{name}.{rank}.error").write_text(traceback.format_exc())
            raise
        torch.save(result, out / f"{name}.{rank}.pt")
    _say_what_ran(rank, imports)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _say_what_ran(rank, imports):
    """This rank's part of the cell's facts; the judge sums the evidence of all processes."""
    if "MCORE_COMPAT_CELL_OUT" not in os.environ:
        return
    os.environ["PYTEST_XDIST_WORKER"] = f"rank{rank}"
    subject = load_subject()
    facts.write(
        facts.versions()
        | {
            "subject": subject.name,
            "evidence": subject.evidence(),
            "seconds": {"imports": round(imports, 2), "suite": round(time.monotonic() - _started, 2)},
            "complete": True,
        }
    )
    from mcore_compat.run.pytest_plugin import pytest_sessionfinish

    pytest_sessionfinish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
