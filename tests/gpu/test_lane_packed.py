"""Packed (THD) rows through the real bf16 chain: rows packed together are the rows alone, and the head is exact."""

from dataclasses import replace

import pytest
import torch
from lane.chain import (
    LANE,
    MODES,
    TIED,
    assert_no_worse_outputs,
    bf16_chain,
    float64_twin,
    fused,
    rms,
    truth_of_the_head,
)
from lane.packed import packed_batch
from support.models import DEVICE
from support.models.packed import Rows, rows_alone
from support.subjects import patched

pytestmark = pytest.mark.needs("call", "patch")

PACKED = replace(LANE, packed=True)
LENGTHS = (23, 1, 40, 0, 9)


@pytest.mark.needs("jagged")
@TIED
@MODES
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.needs("temperature_per_token"))])
def test_packed_rows_equal_rows_alone(subject, mode, tied, each):
    """The framework's jagged forward in bf16, with one temperature or one for each row, against each row alone.

    The unfused bf16 model run row by row is the yardstick: packing must add nothing to its error over float64. The
    fused head has no rounded logits, the body's bf16 rounding is in both. Where the subject ignores no label, what it
    gives for the last token of a row is its own affair.
    """
    shape = replace(PACKED, tied=tied)
    chain, rows = bf16_chain(shape), Rows.of(shape.vocab, LENGTHS, 3)
    temperatures = [0.5, 2.0, 0.9, 1.0, 0.7] if each else [0.7] * len(LENGTHS)
    asked = torch.tensor(temperatures, device=DEVICE) if each else 0.7
    forward = subject.jagged_forward(mode)
    with torch.no_grad():
        with patched(subject, chain, mode):
            output = forward(chain, rows.nested, rows.nested, {}, asked, True, 0, pad_to_length_bucket=128)
        twin = rows_alone(float64_twin(chain, shape), rows, temperatures)
        alone = rows_alone(chain.module.module, rows, temperatures)
    counted = torch.cat([torch.arange(len(ids), device=DEVICE) < len(ids) - 1 for ids in rows.ids])
    counted |= torch.tensor("ignored_labels" in subject.capabilities, device=DEVICE)
    for name, part in (("log_probs", 0), ("entropy", 1)):
        expected = torch.cat([pair[part] for pair in twin])
        unfused = rms((torch.cat([pair[part] for pair in alone]) - expected)[counted])
        error = rms((output[name].values() - expected)[counted])
        assert error <= 1.25 * unfused + 1e-3, f"{name}: error {error:.3g}, unfused bf16 rows alone {unfused:.3g}"


@TIED
@MODES
def test_packed_head_against_float64_logits(subject, mode, tied):
    """The same bound as for padded batches: the head adds a fraction of what rounded logits cost."""
    shape = replace(PACKED, tied=tied)
    chain, batch = bf16_chain(shape), packed_batch(shape.vocab, seed=4)
    truth = truth_of_the_head(chain, batch, 0.7, packed_seq_params=batch.params)
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, 0.7, packed_seq_params=batch.params)
    assert_no_worse_outputs(output, truth, batch.labels)
