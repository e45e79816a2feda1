"""``[tokens, vocab]`` never exists: measured on the device, and seen in the tensors that are made.

At a real vocabulary of 151,936 the bf16 logits of 8,192 tokens are 2.5 GB. What a fused step must hold beyond the
parameters is the kernel's declared workspace (0.6 GB), the gradient of the head's weight and one layer's activations:
below half of the logits, while an unfused step holds them several times (logits, fp32 copy, softmax).
"""

from dataclasses import replace

import pytest
import torch
from lane.chain import LANE, MODES, bf16_chain, fused, weighted
from lane.memory import CUDA, LargestTensor, device_peak
from support.models import batch_for

pytestmark = pytest.mark.needs("call", "patch")

# A rehearsal on a CPU shrinks the problem, not the claim.
VOCAB, SEQ, BATCH = (151_936, 1024, 8) if CUDA else (60_011, 256, 4)
LOGITS = 2 * VOCAB * SEQ * BATCH


@MODES
def test_logits_never_exist(subject, mode, record_property):
    shape = replace(LANE, vocab=VOCAB, tied=True, layers=1)
    chain, batch = bf16_chain(shape), batch_for(VOCAB, BATCH, SEQ)
    largest, loss = LargestTensor(), weighted(batch.labels)

    def step():
        with largest:
            loss(fused(subject, chain, batch, mode, 0.7)).backward()

    step()  # compiles, and lets allocators and workspaces reach their size
    peak = device_peak(step)
    record_property(
        f"fused step at {VOCAB} words and {SEQ * BATCH} tokens ({mode})",
        f"peak {(peak or 0) / 1e6:.0f} MB, largest tensor {largest.largest / 1e6:.0f} MB; logits {LOGITS / 1e6:.0f} MB",
    )
    assert largest.largest < LOGITS / 2, f"a tensor of {largest.largest} bytes was made; logits are {LOGITS}"
    if peak is not None:
        assert peak < LOGITS / 2, f"fused peak {peak}, logits {LOGITS}"


def test_the_measurement_sees_logits(subject):
    """The control: logits of the same model are caught by both measurements."""
    shape = replace(LANE, vocab=VOCAB, tied=True, layers=1)
    chain, batch = bf16_chain(shape), batch_for(VOCAB, BATCH // 2, SEQ)
    largest = LargestTensor()

    def logits():
        with largest, torch.no_grad():
            chain.module.module(*batch.inputs)

    peak = device_peak(logits)
    assert largest.largest >= LOGITS / 2
    assert peak is None or peak >= LOGITS / 2
    with torch.no_grad():  # this check, too, must show the kernel, on the model that it measured
        assert fused(subject, chain, batch, "auto").log_probs.shape == batch.labels.shape
