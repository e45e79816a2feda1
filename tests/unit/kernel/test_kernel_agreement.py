"""Any call agrees with the definition in float64: the torch path, and the Triton kernels in the interpreter."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from kernel_properties import Case, cases, check

from mcore_fused.kernel.schedule import plan_split

# numpy warns where the interpreter meets 0/0 or 0 * inf in lanes that are masked out or poisoned on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
]

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=100, **QUIET)
@given(cases([torch.float64, torch.float32, torch.bfloat16, torch.float16], max_tokens=40, max_width=40, max_rows=300))
def test_any_call_on_the_torch_path(case: Case) -> None:
    check(case, "cpu", "torch")


# no shrinking: an interpreted example takes half a second, and its repr reproduces it
@settings(max_examples=32, phases=(Phase.explicit, Phase.generate), **QUIET)
@given(case=cases([torch.float32, torch.bfloat16, torch.float16], max_tokens=33, max_width=33, max_rows=70))
def test_any_call_in_the_interpreter(interpreter: str, case: Case) -> None:
    check(case, "cpu", interpreter)


@pytest.mark.parametrize("kept", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk_columns", [0, 1])
def test_several_chunks_in_the_interpreter(interpreter: str, kept: float, chunk_columns: int) -> None:
    """More columns than one chunk of 256, so that the fp32 hidden gradient accumulates and kept memory is reused."""
    case = Case(
        tokens=5, width=16, rows=700, padding=3, kept=kept, chunk_columns=chunk_columns, dtype=torch.float32, seed=3
    )
    check(case, "cpu", interpreter)


@pytest.mark.parametrize("rows", [65, 97, 160, 385])
def test_runs_and_tails_in_the_interpreter(interpreter: str, rows: int) -> None:
    """Schedules with a tail: the interpreter pretends to have three programs, of four row blocks each."""
    tokens = 61
    split = plan_split(4, -(-rows // 32), 3)
    assert split.pieces > 1
    check(Case(tokens=tokens, width=16, rows=rows, dtype=torch.float32), "cpu", interpreter)
