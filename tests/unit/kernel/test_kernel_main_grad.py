"""Gradient accumulation fusion: the weight gradient goes into ``main_grad``, and autograd gets a dummy."""

import pytest
import torch
from kernel_lane import INTERPRETER, TORCH, Lane

from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel import PolicyLoss, fused_linear_policy_loss, linear_cross_entropy, schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
]

TOKENS, WIDTH, ROWS, REAL = 20, 16, 300, 297


@pytest.fixture(params=[TORCH, INTERPRETER], ids=["torch", "interpreter"])
def lane(request, interpreter, monkeypatch) -> Lane:
    monkeypatch.setattr(schedule, "TOKEN_STEP", 16)
    return request.param


class FsdpParameter(torch.nn.Parameter):
    """What Megatron-FSDP makes of a parameter: its buffer is handed out on request, with anything in it."""

    def get_main_grad(self):
        return torch.full(self.shape, torch.nan, dtype=torch.float32, device=self.device)


def tensors(lane: Lane, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=rng).to(lane.device, dtype)
    weight = (torch.randn(ROWS, WIDTH, generator=rng) / 4).to(lane.device, dtype)
    labels = torch.randint(0, REAL, (TOKENS,), generator=rng).to(lane.device)
    labels[::4] = -100
    return hidden, weight, labels, torch.randn(2, TOKENS, generator=rng).to(lane.device)


def parameter(weight, *, main_dtype=torch.float32, zero_out=None, marked=True):
    """A weight as Megatron's DistributedDataParallel leaves it, with something in its buffer already."""
    made = torch.nn.Parameter(weight.clone())
    made.main_grad = torch.full(weight.shape, 0.5, dtype=main_dtype, device=weight.device)
    if marked:
        made.grad_added_to_main_grad = False
    if zero_out is not None:
        made.zero_out_wgrad = zero_out
    return made


def by_head(lane, hidden, weight, labels, upstream, **options):
    outputs = linear_cross_entropy(
        hidden, weight, labels, 0.8, vocab_size=REAL, workspace_bytes=0, backend=lane.backend, **options
    )
    torch.autograd.backward(outputs, [g.to(outputs[0].dtype) for g in upstream])


def by_policy(lane, hidden, weight, labels, upstream, *, entropy=0.1, **options):
    loss = fused_linear_policy_loss(
        hidden,
        weight,
        labels,
        upstream[0].clone(),
        PolicyLoss("policy_gradient", entropy_coefficient=entropy),
        vocab_size=REAL,
        logits_bytes=1,
        denominator=3.0,
        backend=lane.backend,
        **options,
    ).loss
    (loss * 0.25).backward()  # a power of two: what was rounded to bf16 before stays in bf16


def reference(call, lane, hidden, weight, labels, upstream):
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    call(lane, h, w, labels, upstream)
    return h.grad, w.grad


@pytest.mark.parametrize("call", [by_head, by_policy])
@pytest.mark.parametrize("zero_out", [None, False, True])
def test_the_gradient_is_added_to_main_grad(lane, call, zero_out) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    grad_hidden, grad_weight = reference(call, lane, hidden, weight, labels, upstream)
    h, w = hidden.clone().requires_grad_(), parameter(weight, zero_out=zero_out)
    lane.poison()  # the dummy is uninitialised memory unless zeros are asked for
    for times in (1, 2):
        call(lane, h, w, labels, upstream, gradient_accumulation_fusion=True)
        assert w.grad_added_to_main_grad is True
        torch.testing.assert_close(w.main_grad, 0.5 + times * grad_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(h.grad, 2 * grad_hidden)
    assert bool((w.main_grad[REAL:] == 0.5).all())
    assert w.grad.shape == w.shape
    assert w.grad.dtype == w.dtype
    if zero_out:
        assert not bool(w.grad.any())


def dlogits(call, hidden, weight, labels, upstream, **options):
    """Of the raw logits, by autograd in float64: what the products of both gradients are made of."""
    raw = (hidden.double() @ weight.double().T).requires_grad_()
    identity = torch.eye(ROWS, dtype=torch.float64)
    call(Lane("cpu", "torch", ()), raw, identity, labels, upstream.double(), **options)
    return raw.grad


@pytest.mark.parametrize("call", [by_head, by_policy])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_weights(lane, call, main_dtype) -> None:
    """Into fp32 the product is added without having been rounded to the weight's dtype.

    Each dlogit is rounded once (twice if exponentials were kept), and so is what is added to bf16: both token chunks'
    sum, and the sum itself. Rounding is off by up to 2^-8; the interpreter truncates, which is off by up to 2^-7.
    """
    hidden, weight, labels, upstream = tensors(lane, torch.bfloat16)
    # without entropy: where its part of a dlogit cancels the other, the rounding of a kept exponential remains
    options = {"entropy": 0.0} if call is by_policy else {}
    d = dlogits(call, hidden, weight, labels, upstream, **options)
    exact, magnitude = d.T @ hidden.double(), d.T.abs() @ hidden.double().abs()
    w = parameter(weight, main_dtype=main_dtype)
    w.main_grad.zero_()
    options |= {"weight_grad_dtype": torch.float32} if call is by_policy else {}
    call(lane, hidden.clone(), w, labels, upstream, gradient_accumulation_fusion=True, **options)
    roundings = 2 + 2 * (main_dtype is torch.bfloat16)
    error = (w.main_grad.double() - exact).abs()
    unit = 2.0**-7 if lane is INTERPRETER else 2.0**-8
    assert bool((error <= ((1 + unit) ** roundings - 1) * magnitude + 1e-6).all())
    assert w.main_grad.dtype == main_dtype
    if main_dtype is torch.float32:
        assert not torch.equal(w.main_grad, w.main_grad.bfloat16().float())


def test_a_cast_weight_keeps_its_books(lane) -> None:
    """A bf16 weight with fp32 hidden states is promoted; the gradient still belongs to the parameter."""
    hidden, weight, labels, upstream = tensors(lane)
    half = weight.bfloat16()
    _, grad_weight = reference(by_head, lane, hidden, half.float(), labels, upstream)
    w = parameter(half)
    by_head(lane, hidden, w, labels, upstream, gradient_accumulation_fusion=True)
    torch.testing.assert_close(w.main_grad, 0.5 + grad_weight, rtol=1e-5, atol=1e-6)
    assert w.grad_added_to_main_grad


def test_a_weight_without_the_mark_gets_no_dummy(lane) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    w = parameter(weight, marked=False)
    by_head(lane, hidden, w, labels, upstream, gradient_accumulation_fusion=True)
    assert w.grad is None
    assert not hasattr(w, "grad_added_to_main_grad")
    assert not bool((w.main_grad[:REAL] == 0.5).all())


def test_without_the_option_main_grad_is_left_alone(lane) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    w = parameter(weight)
    by_head(lane, hidden, w, labels, upstream)
    assert bool((w.main_grad == 0.5).all())
    assert w.grad_added_to_main_grad is False
    torch.testing.assert_close(w.grad, reference(by_head, lane, hidden, weight, labels, upstream)[1])


def test_a_frozen_weight_is_left_alone(lane) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    w = parameter(weight).requires_grad_(False)
    by_head(lane, hidden.requires_grad_(), w, labels, upstream, gradient_accumulation_fusion=True)
    assert bool((w.main_grad == 0.5).all())
    assert w.grad_added_to_main_grad is False
    assert hidden.grad is not None


def test_no_tokens(lane) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    w = parameter(weight)
    by_head(lane, hidden[:0], w, labels[:0], upstream[:, :0], gradient_accumulation_fusion=True)
    assert bool((w.main_grad == 0.5).all())
    assert w.grad_added_to_main_grad


@pytest.mark.parametrize("call", [by_head, by_policy])
def test_a_buffer_of_megatron_fsdp_is_overwritten(lane, call) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    _, grad_weight = reference(call, lane, hidden, weight, labels, upstream)
    w = FsdpParameter(weight.clone())
    w.grad_added_to_main_grad, w.__fsdp_param__ = False, True
    call(lane, hidden, w, labels, upstream, gradient_accumulation_fusion=True)
    torch.testing.assert_close(w.main_grad, grad_weight, rtol=1e-5, atol=1e-6)
    assert w.grad_added_to_main_grad


def test_a_weight_without_a_buffer_is_refused_in_the_backward(lane) -> None:
    hidden, weight, labels, upstream = tensors(lane)
    w = torch.nn.Parameter(weight)
    with torch.no_grad():
        linear_cross_entropy(hidden, w, labels, backend=lane.backend, gradient_accumulation_fusion=True)
    with pytest.raises(CallArgumentError, match="no main_grad"):
        by_head(lane, hidden, w, labels, upstream, gradient_accumulation_fusion=True)
