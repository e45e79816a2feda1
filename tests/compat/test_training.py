"""Five steps of policy-gradient training on the real chain: fused and unfused learn the same."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from support.models import DEVICE, Shape, build, half_chain
from support.subjects import patched

from mcore_compat.testing.reference import stock_forward

pytestmark = pytest.mark.needs("call", "patch")

LENGTHS = (5, 1, 7)
STEPS = 5


def _packed_batch():
    """Three rows packed into one, labels shifted inside each row (the last token of a row predicts nothing)."""
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]
    labels = torch.cat([torch.cat((row[1:], torch.tensor([-100]))) for row in rows])[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=7, max_seqlen_kv=7
    )
    advantages = torch.randn(1, sum(LENGTHS), generator=generator)
    tensors = (torch.cat(rows)[None], positions, labels, advantages)
    ids, positions, labels, advantages = (tensor.to(DEVICE) for tensor in tensors)
    return (ids, positions, None), labels, advantages, packed


def _train(subject, mode, tied):
    """Losses and final parameters after plain SGD on DDP's fp32 gradients."""
    model = build(Shape(dtype=torch.bfloat16, packed=True, tied=tied))
    chain = half_chain(model)
    chain.train()
    inputs, labels, advantages, packed = _packed_batch()
    masters = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    losses = []
    for _ in range(STEPS):
        chain.zero_grad_buffer()
        arguments = {"labels": labels, "packed_seq_params": packed, "temperature": 0.8}
        if mode == "unfused":
            output = stock_forward(model, *inputs, **arguments)
        else:
            with patched(subject, chain, mode):
                output = subject.call(chain, *inputs, **arguments)
        loss = -(advantages * output.log_probs).sum() - 0.05 * output.entropy.sum()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                masters[name] -= 2e-3 * parameter.main_grad.float()
                parameter.copy_(masters[name])
    return torch.tensor(losses), masters


@pytest.mark.parametrize("tied", [False, True])
def test_five_training_steps(subject, tied):
    """Forced legacy follows the natural mode bit for bit; unfused follows within the rounding of bf16 logits.

    The unfused path rounds each logit (below 32) to bf16, an error of up to 2^-4 a token and random in sign; the
    loss sums 10 real tokens with weights of order 1, so the curves stay within some tenths, while the loss itself
    moves by several units.
    """
    (auto, auto_weights), (legacy, legacy_weights), (unfused, _) = (
        _train(subject, mode, tied) for mode in ("auto", "legacy", "unfused")
    )
    assert torch.equal(auto, legacy)
    assert all(torch.equal(auto_weights[name], legacy_weights[name]) for name in auto_weights)
    assert (auto - unfused).abs().max() < 0.5
    assert auto[0] - auto[-1] > 1.0  # it learns
