"""``[tokens, vocab]`` never exists: measured on the device, and seen in the tensors that are made.

At a real vocabulary of 151,936 the bf16 logits of 4,096 tokens are 1.2 GB. The bound for a fused step is what it must
hold: the gradients of the head's weight, and the kernel's declared workspace; with the body's activations that stays
below half of the logits, while the unfused step holds them several times (logits, fp32 copy, softmax).
"""

from dataclasses import replace

import pytest
import torch
from lane.chain import LANE, bf16_chain, fused
from lane.memory import CUDA, LargestTensor, device_peak
from support.models import batch_for
from support.reference import stock_forward

pytestmark = pytest.mark.needs("call", "patch", "legacy")

# A rehearsal on a CPU shrinks the problem, not the claim.
VOCAB, SEQ, BATCH = (151_936, 1024, 4) if CUDA else (60_011, 256, 4)
LOGITS = 2 * VOCAB * SEQ * BATCH


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_logits_never_exist(subject, mode):
    shape = replace(LANE, vocab=VOCAB, tied=True, layers=1)
    chain, batch = bf16_chain(shape), batch_for(VOCAB, BATCH, SEQ)
    weight = 2 * VOCAB * shape.hidden
    largest = LargestTensor()

    def step():
        with largest:
            output = fused(subject, chain, batch, mode, 0.7)
            (output.log_probs.sum() - 0.1 * output.entropy.sum()).backward()

    step()  # compiles, and lets allocators and workspaces reach their size
    peak = device_peak(step)
    assert largest.largest < LOGITS / 2, f"a tensor of {largest.largest} bytes was made; logits are {LOGITS}"
    if peak is not None:
        # weight gradient (bf16), its copy in autograd's hands, fp32 workspaces of 512 MiB, attention of one layer
        assert peak < max(LOGITS / 2, 2 * weight + (600 << 20)), f"fused peak {peak}, logits {LOGITS}"


def test_the_measurement_sees_logits(subject):
    """The control: the unfused step on the same model is caught by both measurements."""
    shape = replace(LANE, vocab=VOCAB, tied=True, layers=1)
    chain, batch = bf16_chain(shape), batch_for(VOCAB, BATCH, SEQ)
    largest = LargestTensor()

    def step():
        with largest, torch.no_grad():
            stock_forward(chain.module.module, *batch.inputs, labels=batch.labels)

    peak = device_peak(step)
    assert largest.largest >= LOGITS
    assert peak is None or peak >= LOGITS
    with torch.no_grad():  # this check, too, must show the kernel, on the model that it measured
        assert fused(subject, chain, batch, "auto").log_probs.shape == batch.labels.shape
