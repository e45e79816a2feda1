"""Set-up of the checks of several ranks: the ranks run once, under torchrun, and the checks look at what they left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent), str(_HERE.parents[1] / "compat")]
pytest_plugins = ["support.session"]

import torch  # noqa: E402
from lane.paths import CUDA, expected_paths  # noqa: E402

_LIMIT_S = 240


class Ranks:
    """What the ranks left behind, by job."""

    def __init__(self, out, world, problem):
        self._out = out
        self._world = world
        self._problem = problem

    def __call__(self, name):
        """The results of a job, in rank order; the failure of a rank fails the check that asks."""
        errors = [file.read_text() for file in sorted(self._out.glob(f"{name}.*.error"))]
        assert not errors, "\n".join(errors)
        files = [self._out / f"{name}.{rank}.pt" for rank in range(self._world)]
        assert all(file.is_file() for file in files), f"job {name} did not run: {self._problem}"
        return [torch.load(file, weights_only=False, map_location="cpu") for file in files]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Runs all jobs on ``MCORE_COMPAT_NPROC`` ranks (2): NCCL where each has a GPU, gloo otherwise."""
    world, out = int(os.environ.get("MCORE_COMPAT_NPROC", "2")), tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    problem = ""
    with (out / "ranks.log").open("w") as log:
        try:
            done = subprocess.run(
                [*command, str(_HERE / "rank_main.py"), str(out)], stdout=log, stderr=log, timeout=_LIMIT_S, check=False
            )
            problem = f"the ranks ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"the ranks did not end within {_LIMIT_S} s"
    failed = sorted(file.stem for file in out.glob("*.error"))
    if failed:
        problem += f", first failure in {failed[0]}"
    sys.stdout.write((out / "ranks.log").read_text()[-4000:])
    return Ranks(out, world, problem)


@pytest.fixture
def on_the_kernel():
    """Asserts that a job's fused head ran where it was promised on every rank that has one."""

    def check(results, *, which=slice(None)):
        for rank, result in list(enumerate(results))[which]:
            ran = set(result["paths"])
            assert ran, f"no fused head ran on rank {rank}"
            assert ran <= expected_paths("gpu"), f"rank {rank} ran on {sorted(ran)}"

    return check


def pytest_report_header():
    return f"ranks: {'NCCL' if CUDA and torch.cuda.device_count() > 1 else 'gloo'}"
