"""Properties of the CPU lane that hold on a GPU as they are: float64 numbers, and packing through the real model.

In float64 there is no kernel: the torch path of the library is what these promise.
"""

import pytest
from test_mup import test_mup_multiplier
from test_numbers import (
    test_forced_legacy_equals_hook_bit_for_bit,
    test_gradients,
    test_ignored_labels_are_exactly_zero,
    test_outputs,
    test_the_head_weight_gets_its_gradient,
)
from test_packing_in_model import (
    test_extra_padding_changes_neither_loss_nor_gradient,
    test_gradients_of_packed_rows_equal_those_of_rows_alone,
    test_packed_rows_equal_rows_alone,
)
from test_safety import test_every_fused_call_leaves_evidence, test_threads

# The marks of a module do not travel with what is imported from it.
pytestmark = [
    pytest.mark.kernel("torch"),
    pytest.mark.needs("call", "patch", "legacy", "float64", "factories", "evidence"),
]
test_mup_multiplier = pytest.mark.since("mup")(test_mup_multiplier)

__all__ = [
    "test_every_fused_call_leaves_evidence",
    "test_extra_padding_changes_neither_loss_nor_gradient",
    "test_forced_legacy_equals_hook_bit_for_bit",
    "test_gradients",
    "test_gradients_of_packed_rows_equal_those_of_rows_alone",
    "test_ignored_labels_are_exactly_zero",
    "test_mup_multiplier",
    "test_outputs",
    "test_packed_rows_equal_rows_alone",
    "test_the_head_weight_gets_its_gradient",
    "test_threads",
]
