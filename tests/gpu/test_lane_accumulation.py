"""Gradient accumulation fusion on the GPU: the checks of the CPU lane, with the kernels' own products.

Megatron's extension runs if the host has it, and its definition otherwise.
"""

import pytest
from test_gradient_accumulation import (
    test_half_precision_buffers,
    test_one_micro_batch,
    test_stock_and_fused_micro_batches_in_any_order,
)

# The marks of a module do not travel with what is imported from it.
pytestmark = pytest.mark.needs("call", "patch", "main_grad")

__all__ = [
    "test_half_precision_buffers",
    "test_one_micro_batch",
    "test_stock_and_fused_micro_batches_in_any_order",
]
