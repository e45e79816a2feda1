"""The tests of tests/unit/kernel on a GPU: Gluon kernels, plain Triton with TMA, with pointers, and the torch path."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernel"))
pytest.register_assert_rewrite("kernel_properties", "test_kernel_semantics", "test_kernel_policy_loss")

from kernel_lane import Lane  # noqa: E402
from kernel_properties import Case, cases, check  # noqa: E402
from test_kernel_policy_loss import *  # noqa: E402, F403  (the tests themselves)
from test_kernel_semantics import *  # noqa: E402, F403  (the tests themselves)

from mcore_fused.kernel import gluon_support, kernel_launches, launchers, operands, schedule  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALF = (torch.bfloat16, torch.float16)
LANES = {
    "gluon": Lane("cuda", "triton", HALF, torch.bfloat16),
    "plain": Lane("cuda", "triton", (*HALF, torch.float32), torch.bfloat16),
    "plain-fp32": Lane("cuda", "triton", (torch.float32,), torch.float32),
    "pointers": Lane("cuda", "triton", (*HALF, torch.float32), torch.bfloat16),
    "torch": Lane("cuda", "torch", (torch.float64, torch.float32, *HALF), torch.float32),
}


@pytest.fixture(params=LANES)
def lane(request, monkeypatch) -> Lane:
    monkeypatch.setattr(schedule, "TOKEN_STEP", 16)  # several token chunks of the folded loss at test sizes
    if request.param == "gluon":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the Gluon kernels are for compute capability 9.0")
        state = gluon_support.gluon_support(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
        assert state.enabled, state.reason
    else:
        monkeypatch.setattr(launchers, "gluon_enabled", lambda *_: False)
    if request.param == "pointers":
        monkeypatch.setattr(operands, "tma_readable", lambda _: False)
    return LANES[request.param]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(case=cases([torch.bfloat16, torch.float16, torch.float32], max_tokens=300, max_width=300, max_rows=1100))
def test_any_call_on_the_gpu(lane, case: Case) -> None:
    if case.dtype in lane.dtypes:
        check(case, lane.device, lane.backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kept", [0.0, 0.5, 2.0])
def test_several_chunks_and_splits(lane, dtype, kept) -> None:
    """Sizes that TMA can read, several tiles in each direction, several chunks, padding inside the last tile."""
    if dtype not in lane.dtypes:
        pytest.skip("this lane does not take the dtype")
    check(
        Case(
            tokens=300,
            width=136,
            rows=1500,
            padding=100,
            kept=kept,
            chunk_columns=512,
            dtype=dtype,
            temperature="tensor",
            seed=5,
        ),
        lane.device,
        lane.backend,
    )


def test_the_lane_runs_what_it_says(lane, request) -> None:
    before = kernel_launches()
    check(Case(tokens=40, width=64, rows=300, dtype=lane.dtype), lane.device, lane.backend)
    after = kernel_launches()
    name = request.node.callspec.params["lane"]
    path = "gluon" if name == "gluon" else "torch" if name == "torch" else "triton"
    assert getattr(after, path) - getattr(before, path) == 1
    assert after.total - before.total == 1
