"""What MuP and multi-token prediction must do in a fused call; asked for one row and for several."""

from dataclasses import replace

import torch
from support.models import HAS_MUP, batch_for
from support.subjects import patched

from lane.chain import (
    FP32_NOISE,
    LANE,
    assert_no_worse_outputs,
    bf16_chain,
    fused,
    main_gradients,
    rms,
    truth_of_the_head,
)
from mcore_compat.testing.reference import stock_forward


def assert_mup_is_inside(subject, batch, mode):
    """MuP's multiplier is inside stock's logits and must be inside the fused ones."""
    assert HAS_MUP
    chain, counted = bf16_chain(replace(LANE, mup=True)), batch.labels != -100
    scale = chain.module.module._scale_logits(torch.ones(1)).item()
    truth = truth_of_the_head(chain, batch, 0.7)
    with torch.no_grad():
        output = fused(subject, chain, batch, mode, 0.7)
        scaled = truth_of_the_head(chain, batch, 0.7 / scale)
    assert scale != 1
    error, unfused = (rms((found.log_probs - scaled.log_probs)[counted]) for found in (output, truth.unfused))
    assert error <= unfused / 8 + FP32_NOISE, f"log_probs: error {error:.3g}, unfused bf16 path {unfused:.3g}"


def assert_mtp_learns(subject, rows, tied, mode):
    """The main head's outputs are right with MTP on, and MTP's own parameters learn from their own loss."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    chain, batch = bf16_chain(replace(LANE, tied=tied, mtp=1)), batch_for(LANE.vocab, rows, 33, seed=3)
    inputs = {"loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)}
    chain.train()
    truth = truth_of_the_head(chain, batch, 0.7, **inputs)
    # The same incoming gradient for both, one number a token: MTP's own loss does not see it.
    ones = torch.ones(batch.labels.shape, device=batch.labels.device)
    stock = stock_forward(chain.module.module, *batch.inputs, labels=batch.labels, **inputs)
    (stock.log_probs * ones).sum().backward()
    expected = main_gradients(chain)
    output = fused(subject, chain, batch, mode, 0.7, **inputs)
    assert_no_worse_outputs(output, truth, batch.labels)
    main_gradients(chain)
    with patched(subject, chain, mode):
        output = subject.call(chain, *batch.inputs, labels=batch.labels, **inputs)
        (output.log_probs * ones).sum().backward()
    actual = main_gradients(chain)
    own = [name for name in actual if name.startswith("mtp.")]
    assert own
    for name in own:
        difference = ((actual[name] - expected[name]).norm() / expected[name].norm()).item()
        # Stock's MTP logits are rounded to bf16, ours are not: gradients differ by that rounding.
        assert difference <= 0.1, f"{name}: relative difference {difference:.3g}"
