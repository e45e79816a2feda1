"""Packed (THD) rows through the real bf16 chain: rows packed together are the rows alone, and the head is exact."""

from dataclasses import replace

import pytest
import torch
from lane.chain import LANE, bf16_chain, float64_twin, rms, truth_of_the_head
from lane.packed import packed_batch
from support.models import DEVICE
from support.packed import Rows, rows_alone
from support.subject import patched

pytestmark = pytest.mark.needs("call", "patch", "factories")

TIED = pytest.mark.parametrize("tied", [False, True])
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
PACKED = replace(LANE, packed=True)
LENGTHS = (23, 1, 40, 0, 9)


@TIED
@MODES
def test_packed_rows_equal_rows_alone(subject, mode, tied):
    """The framework's jagged forward in bf16, with a temperature for each row, against each row alone in float64.

    The unfused bf16 model run row by row is the yardstick: packing must add nothing to its error. The fused head has
    no rounded logits, the body's bf16 rounding is in both.
    """
    from mcore_fused.model_forward import fused_forward_no_padding_gen

    shape = replace(PACKED, tied=tied)
    chain, rows = bf16_chain(shape), Rows.of(shape.vocab, LENGTHS, 3)
    temperatures = torch.tensor([0.5, 2.0, 0.9, 1.0, 0.7], device=DEVICE)
    forward = fused_forward_no_padding_gen(mode=mode)
    with torch.no_grad():
        output = forward(chain, rows.nested, rows.nested, {}, temperatures, True, 0, pad_to_length_bucket=128)
        twin = rows_alone(float64_twin(chain, shape), rows, temperatures)
        alone = rows_alone(chain.module.module, rows, temperatures)
    for name, part in (("log_probs", 0), ("entropy", 1)):
        expected = torch.cat([pair[part] for pair in twin])
        unfused = rms(torch.cat([pair[part] for pair in alone]) - expected)
        error = rms(output[name].values() - expected)
        assert error <= 1.25 * unfused + 1e-3, f"{name}: error {error:.3g}, unfused bf16 rows alone {unfused:.3g}"


@TIED
@MODES
def test_packed_head_against_float64_logits(subject, mode, tied):
    """The same bound as for padded batches: the head adds a fraction of what rounded logits cost."""
    shape = replace(PACKED, tied=tied)
    chain, batch = bf16_chain(shape), packed_batch(shape.vocab, seed=4)
    truth = truth_of_the_head(chain, batch, 0.7, packed_seq_params=batch.params)
    with torch.no_grad(), patched(subject, chain, mode):
        output = subject.call(
            chain, *batch.inputs, labels=batch.labels, temperature=0.7, packed_seq_params=batch.params
        )
    for name in ("log_probs", "entropy"):
        unfused = rms(getattr(truth.unfused, name) - getattr(truth, name))
        assert rms(getattr(output, name) - getattr(truth, name)) <= unfused / 8 + 1e-5
