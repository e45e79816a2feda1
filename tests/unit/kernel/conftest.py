"""These tests run the Triton kernels in Triton's CPU interpreter, which Triton decides when it is imported."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def interpreter() -> str:
    """The backend's name, where kernels are really interpreted."""
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.fail("Triton was imported before TRITON_INTERPRET was set: run tests/unit/kernel in its own process")
    return "triton"
