"""One row of bf16 on the GPU, as frameworks run it that pack every micro-batch: no pairing of rows, no ignored label.

What several rows, ignored labels and per-token temperatures add is in ``test_lane_numbers.py``; the bounds are its. A
subject that is right for one row and wrong for several shows it here.
"""

from dataclasses import replace

import pytest
import torch
from lane.chain import (
    LANE,
    MODES,
    TIED,
    assert_no_worse_gradients,
    assert_no_worse_outputs,
    bf16_chain,
    fused,
    truth_of_the_head,
    weighted,
)
from lane.features import assert_mtp_learns, assert_mup_is_inside
from support.models import batch_for, unwrapped
from support.subjects import patched

pytestmark = pytest.mark.needs("call", "patch")


def _row():
    return batch_for(LANE.vocab, 1, 111, seed=7)


@MODES
@TIED
def test_outputs_of_one_row(subject, tied, mode):
    chain, batch = bf16_chain(replace(LANE, tied=tied)), _row()
    truth = truth_of_the_head(chain, batch, 0.7)
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, 0.7)
    assert_no_worse_outputs(output, truth, batch.labels)


@MODES
@TIED
def test_gradients_of_one_row(subject, tied, mode):
    batch = _row()
    assert_no_worse_gradients(subject, replace(LANE, tied=tied), batch, mode, weighted(batch.labels))


@MODES
def test_gradients_of_a_plain_sum(subject, mode):
    """K3: the gradient of a sum is one number spread over all tokens, a tensor without strides of its own."""
    assert_no_worse_gradients(
        subject, LANE, _row(), mode, lambda output: output.log_probs.sum() - 0.5 * output.entropy.sum()
    )


@pytest.mark.needs("mup")
@pytest.mark.since("mup")
@MODES
def test_mup_of_one_row(subject, mode):
    assert_mup_is_inside(subject, _row(), mode)


@pytest.mark.needs("mtp")
@pytest.mark.since("mtp")
@MODES
@TIED
def test_multi_token_prediction_of_one_row(subject, tied, mode):
    assert_mtp_learns(subject, 1, tied, mode)


@MODES
def test_without_labels_the_logits_are_stock_s(subject, mode):
    """P9: generation and value models call a patched model without labels."""
    chain, batch = bf16_chain(LANE), _row()
    with torch.no_grad():
        stock = chain(*batch.inputs)
        with patched(subject, chain, mode):
            subject.call(chain, *batch.inputs, labels=batch.labels)
            logits = subject.call(chain, *batch.inputs, labels=None)
    assert torch.equal(logits, stock)


@MODES
def test_unpatch_leaves_nothing_behind(subject, mode):
    """``vars`` of every module and the names of the state, after a fused call; not only that ``forward`` is reached."""
    chain, batch = bf16_chain(LANE), _row()
    with torch.no_grad():
        chain(*batch.inputs)  # Megatron itself notes some things on the first call
        before = [dict(vars(module)) for module in chain.modules()]
        names = list(chain.state_dict())
        fused(subject, chain, batch, mode, 0.7)
    left = {
        f"{type(module).__name__}.{name}"
        for was, module in zip(before, chain.modules(), strict=True)
        for name in vars(module).keys() ^ was.keys()
    }
    assert not left, f"unpatch left these attributes: {sorted(left)}"
    assert list(chain.state_dict()) == names
    assert "forward" not in vars(unwrapped(chain))
