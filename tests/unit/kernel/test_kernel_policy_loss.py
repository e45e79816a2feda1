"""The folded policy loss equals the same loss written over float64 logits with ordinary autograd."""

import math

import pytest
import torch
from kernel_lane import INTERPRETER, TORCH, Lane

from mcore_fused.errors import CallArgumentError, CallTypeError
from mcore_fused.kernel import PolicyLoss, fused_linear_policy_loss, schedule
from mcore_fused.kernel.reference import reference_linear_cross_entropy

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
]


@pytest.fixture(params=[TORCH, INTERPRETER], ids=["torch", "interpreter"])
def lane(request, interpreter, monkeypatch) -> Lane:
    monkeypatch.setattr(schedule, "TOKEN_STEP", 16)  # several chunks at sizes that the interpreter can take
    return request.param


POLICIES = {
    "policy gradient": PolicyLoss("policy_gradient"),
    "policy gradient with entropy": PolicyLoss("policy_gradient", entropy_coefficient=0.1),
    "ppo": PolicyLoss("ppo", clip_low=0.1, clip_high=0.3, entropy_coefficient=0.01),
    "grpo": PolicyLoss("ppo", kl_coefficient=0.2, kl="k3"),
    "k1": PolicyLoss("ppo", kl_coefficient=0.2, kl="k1"),
    "k2": PolicyLoss("policy_gradient", kl_coefficient=0.2, kl="k2"),
}


def expected_loss(policy, lp, entropy, advantages, old, ref):
    """Written out once more, from the definitions, without the library's function."""
    if policy.kind == "policy_gradient":
        loss = -advantages * lp
    else:
        ratio = (lp - old).exp()
        low, high = 1 - policy.clip_low, 1 + policy.clip_high
        loss = torch.where(
            advantages > 0,
            -advantages * torch.where(ratio > high, high, ratio),
            -advantages * torch.where(ratio < low, low, ratio),
        )
    loss = loss - policy.entropy_coefficient * entropy
    gap = lp - ref
    kl = {"k1": gap, "k2": gap.square() / 2, "k3": (-gap).exp() - 1 + gap}[policy.kl]
    return loss + policy.kl_coefficient * kl if policy.kl_coefficient else loss


def policy_inputs(lane: Lane, tokens=40, width=8, rows=40):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=rng).to(lane.device)
    weight = (torch.randn(rows, width, generator=rng) / 4).to(lane.device)
    labels = torch.randint(0, rows, (tokens,), generator=rng).to(lane.device)
    labels[::5] = -100
    lp, _ = reference_linear_cross_entropy(hidden, weight, labels, 0.8)
    noise = torch.randn(3, tokens, generator=rng).to(lane.device)
    advantages = noise[0].masked_fill(labels == -100, math.nan)  # padding may hold anything
    return hidden, weight, labels, advantages, lp.float() + 0.3 * noise[1], lp.float() + 0.5 * noise[2]


@pytest.mark.parametrize("name", POLICIES)
def test_policy_loss_and_both_gradients(lane, name) -> None:
    policy = POLICIES[name]
    denominator = 7.0 if policy.entropy_coefficient else None
    hidden, weight, labels, advantages, old, ref = policy_inputs(lane)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    got = fused_linear_policy_loss(
        h,
        w,
        labels,
        advantages,
        policy,
        old_log_probs=old,
        ref_log_probs=ref,
        temperature=0.8,
        denominator=denominator,
        logits_bytes=1,
        backend=lane.backend,  # three chunks of 16, 16 and 8 tokens
    )
    (got.loss * 0.3).backward()
    rh, rw = hidden.double().requires_grad_(), weight.double().requires_grad_()
    lp, entropy = reference_linear_cross_entropy(rh, rw, labels, 0.8)
    counted = labels != -100
    loss = expected_loss(policy, lp, entropy, advantages.double(), old.double(), ref.double())[counted]
    want = loss.sum() / (denominator or counted.sum())
    (want * 0.3).backward()
    torch.testing.assert_close(got.loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.log_probs.double(), lp.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.grad.double(), rh.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(w.grad.double(), rw.grad, rtol=1e-4, atol=1e-6)
    gap = (lp - ref)[counted].detach()
    kl = {"k1": gap, "k2": gap.square() / 2, "k3": (-gap).exp() - 1 + gap}[policy.kl]
    torch.testing.assert_close(got.mean_kl.double(), kl.mean(), rtol=1e-4, atol=1e-6)
    if policy.kind == "ppo":
        ratio = (lp - old)[counted].exp()
        a = advantages[counted]
        clipped = ((a > 0) & (ratio > 1 + policy.clip_high)) | ((a < 0) & (ratio < 1 - policy.clip_low))
        assert 0 < float(clipped.float().mean()) < 1
        torch.testing.assert_close(got.clip_fraction, clipped.float().mean())


@pytest.mark.parametrize("train", [(True, False), (False, True), (False, False)])
def test_policy_only_what_is_trained(lane, train) -> None:
    hidden, weight, labels, advantages, old, _ = policy_inputs(lane, tokens=20)
    h, w = hidden.requires_grad_(train[0]), weight.requires_grad_(train[1])
    got = fused_linear_policy_loss(h, w, labels, advantages, PolicyLoss(), old_log_probs=old, backend=lane.backend)
    assert got.loss.requires_grad == any(train)
    if any(train):
        got.loss.backward()
    assert (h.grad is not None, w.grad is not None) == train
    with torch.no_grad():
        again = fused_linear_policy_loss(
            h, w, labels, advantages, PolicyLoss(), old_log_probs=old, backend=lane.backend
        )
    assert torch.equal(again.loss, got.loss)


def test_policy_the_weight_gradient_may_be_summed_in_fp32(lane) -> None:
    """In bf16 each of three chunks rounds the sum; in fp32 only the result is rounded."""
    hidden, weight, labels, advantages, old, _ = policy_inputs(lane)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
        fused_linear_policy_loss(
            h,
            w,
            labels,
            advantages,
            PolicyLoss(),
            old_log_probs=old,
            logits_bytes=1,
            weight_grad_dtype=dtype,
            backend=lane.backend,
        ).loss.backward()
        assert w.grad.dtype == torch.bfloat16
        found.append(w.grad.double())
    rw = weight.bfloat16().double().requires_grad_()
    lp, _ = reference_linear_cross_entropy(hidden.bfloat16(), rw, labels)
    counted = labels != -100
    expected_loss(PolicyLoss(), lp, 0, advantages, old, old)[counted].mean().backward()
    errors = [float((g - rw.grad).norm() / rw.grad.norm()) for g in found]
    # dlogits of kept exponentials are rounded twice, each time by up to 2^-9 of themselves
    assert errors[1] < errors[0] < 8e-3
    assert errors[1] < 2 * 2.0**-9 + 2.0**-9


def test_policy_it_can_be_differentiated_once(lane) -> None:
    hidden, weight, labels, advantages, old, _ = policy_inputs(lane, tokens=20)
    loss = fused_linear_policy_loss(
        hidden.requires_grad_(), weight, labels, advantages, PolicyLoss(), old_log_probs=old, backend=lane.backend
    ).loss
    loss.backward(retain_graph=True)
    with pytest.raises(CallArgumentError, match="twice"):
        loss.backward()


def test_policy_no_tokens(lane) -> None:
    hidden, weight, labels, advantages, old, _ = policy_inputs(lane, tokens=20)
    w = weight.requires_grad_()
    got = fused_linear_policy_loss(
        hidden[:0],
        w,
        labels[:0],
        advantages[:0],
        PolicyLoss(),
        old_log_probs=old[:0],
        denominator=1.0,
        backend=lane.backend,
    )
    assert got.loss == 0
    got.loss.backward()
    assert bool((w.grad == 0).all())


def test_policy_what_cannot_be_meant_is_refused() -> None:
    hidden, weight, labels, advantages, old, _ = policy_inputs(TORCH, tokens=4)
    for change, kind, words in (
        ({"policy": PolicyLoss()}, CallArgumentError, "old_log_probs is missing"),
        ({"policy": PolicyLoss("policy_gradient", kl_coefficient=1.0)}, CallArgumentError, "ref_log_probs is missing"),
        ({"advantages": advantages[:3]}, CallArgumentError, "advantages has shape"),
        ({"advantages": labels}, CallTypeError, "advantages"),
        ({"old_log_probs": old, "denominator": 0.0}, CallArgumentError, "denominator"),
    ):
        arguments = {"advantages": advantages, "policy": PolicyLoss()} | change
        with pytest.raises(kind, match=words):
            fused_linear_policy_loss(hidden, weight, labels, **arguments)
    for bad in ({"kind": "sac"}, {"kl": "k4"}, {"clip_low": -0.1}, {"entropy_coefficient": math.nan}):
        with pytest.raises(CallArgumentError):
            PolicyLoss(**bad)
