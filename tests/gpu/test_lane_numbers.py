"""The fused head in bf16 on the GPU, through the real wrapper chain, against float64 logits.

Error analysis: the kernel multiplies bf16 operands exactly and sums in fp32 (unit roundoff 6e-8); the unfused path does
the same and then rounds every logit to bf16 (unit roundoff 4e-3), which is what its error consists of. The fused error
is therefore bounded by a fraction of the unfused one, plus fp32's own on values up to some tens: 1e-5.
"""

from dataclasses import replace

import pytest
import torch
from lane.chain import (
    LANE,
    MODES,
    SPECS,
    TIED,
    assert_no_worse_gradients,
    assert_no_worse_outputs,
    bf16_chain,
    fused,
    main_gradients,
    truth_of_the_head,
    weighted,
)
from lane.features import assert_mtp_learns, assert_mup_is_inside
from support.models import batch_for

pytestmark = pytest.mark.needs("call", "patch", "evidence")


def _temperature(kind, labels):
    if kind == "number":
        return 0.7
    generator = torch.Generator().manual_seed(5)
    return (torch.rand(labels.shape, generator=generator) + 0.5).to(labels.device)


def _batch(shape):
    batch = batch_for(shape.vocab, 3, 37, seed=1)
    batch.labels[0, 3:5] = -100
    return batch


@MODES
@TIED
@pytest.mark.parametrize(
    "temperature",
    ["number", pytest.param("per token", marks=pytest.mark.needs("temperature_per_token"))],
)
@pytest.mark.parametrize("spec", SPECS)
def test_outputs_against_float64_logits(subject, spec, temperature, tied, mode):
    """Log-probs and entropy, three rows (a flattening without a transpose pairs wrong rows), some labels ignored."""
    shape = replace(LANE, tied=tied)
    chain, batch = bf16_chain(shape, spec), _batch(shape)
    temperature = _temperature(temperature, batch.labels)
    truth = truth_of_the_head(chain, batch, temperature)
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, temperature)
    assert_no_worse_outputs(output, truth, batch.labels)


@pytest.mark.needs("ignored_labels")
@MODES
def test_ignored_labels_give_exactly_zero(subject, mode):
    chain, batch = bf16_chain(LANE), _batch(LANE)
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, 0.7)
    assert not output.log_probs[0, 3:5].any()
    assert not output.entropy[0, 3:5].any()


@pytest.mark.needs("mup")
@pytest.mark.since("mup")
@MODES
def test_outputs_with_mup(subject, mode):
    assert_mup_is_inside(subject, _batch(LANE), mode)


@MODES
@TIED
def test_gradients_against_float64(subject, tied, mode):
    """Every parameter's gradient after one backward through DDP's buffers: no worse than the unfused bf16 path's."""
    shape = replace(LANE, tied=tied)
    batch = _batch(shape)
    assert_no_worse_gradients(subject, shape, batch, mode, weighted(batch.labels))


@pytest.mark.needs("legacy")
@TIED
def test_forced_legacy_equals_hook_bit_for_bit(subject, tied):
    """One head in two installations, and one kernel whose sums have one order: equal, gradients included."""
    shape = replace(LANE, tied=tied)
    chain, batch = bf16_chain(shape), _batch(shape)
    results = []
    for mode in ("auto", "legacy"):
        output = fused(subject, chain, batch, mode, 0.7)
        (output.log_probs.sum() - 0.3 * output.entropy.sum()).backward()
        results.append((output, main_gradients(chain)))
    (first, first_gradients), (second, second_gradients) = results
    assert torch.equal(first.log_probs, second.log_probs)
    assert torch.equal(first.entropy, second.entropy)
    different = [
        name for name, gradient in first_gradients.items() if not torch.equal(gradient, second_gradients[name])
    ]
    assert not different


@pytest.mark.needs("mtp")
@pytest.mark.since("mtp")
@MODES
@TIED
def test_multi_token_prediction(subject, tied, mode):
    assert_mtp_learns(subject, 2, tied, mode)
