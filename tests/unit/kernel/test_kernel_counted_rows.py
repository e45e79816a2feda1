"""``counted_rows``: the rows that count give what a call on them alone gives, and the others give nothing."""

import math

import pytest
import torch
from kernel_lane import INTERPRETER, TORCH, Lane

from mcore_fused.errors import CallArgumentError, CallTypeError
from mcore_fused.kernel import PolicyLoss, fused_linear_policy_loss, linear_cross_entropy, torch_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
]

TOKENS, WIDTH, ROWS = 24, 8, 70


@pytest.fixture(params=[TORCH, INTERPRETER], ids=["torch", "interpreter"])
def lane(request, interpreter) -> Lane:
    return request.param


def tensors(lane: Lane, share: float):
    """Hidden states, weight, labels, one temperature per token (0 where ignored), two upstream gradients."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=rng)
    weight = torch.randn(ROWS, WIDTH, generator=rng)
    labels = torch.randint(0, ROWS, (TOKENS,), generator=rng)
    chosen = torch.randperm(TOKENS, generator=rng)[: int(share * TOKENS)]
    ignored = torch.ones(TOKENS, dtype=torch.bool).index_fill_(0, chosen, value=False)
    labels[ignored] = -100
    temperature = (torch.rand(TOKENS, generator=rng) + 0.5).masked_fill(ignored, 0.0)
    upstream = torch.randn(2, TOKENS, generator=rng).masked_fill(ignored, math.nan)  # padding may hold anything
    return tuple(value.to(lane.device) for value in (hidden, weight, labels, temperature, upstream))


def step(lane, hidden, weight, labels, temperature, upstream, **options):
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = linear_cross_entropy(h, w, labels, temperature, backend=lane.backend, **options)
    torch.autograd.backward(outputs, list(upstream))
    return [o.detach() for o in outputs], h.grad, w.grad


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("spare", [0, 3])
def test_counted_rows_equal_a_call_on_them_alone_bit_for_bit(lane, share, spare) -> None:
    hidden, weight, labels, temperature, upstream = tensors(lane, share)
    rows = (labels != -100).nonzero()[:, 0]
    outputs, grad_hidden, grad_weight = step(
        lane, hidden, weight, labels, temperature, upstream, counted_rows=len(rows) + spare
    )
    # alone: as many rows as are computed, the spare ones ignored
    alone = torch.cat([rows, rows.new_zeros(min(spare, TOKENS - len(rows)))])
    few = labels[alone].clone()
    few[len(rows) :] = -100
    values, expected_hidden, expected_weight = step(
        lane, hidden[alone], weight, few, temperature[alone].clamp(min=0.5), upstream[:, alone]
    )
    for output, value in zip(outputs, values, strict=True):
        assert torch.equal(output[rows], value[: len(rows)])
        assert bool((output[labels == -100] == 0).all())
    assert torch.equal(grad_hidden[rows], expected_hidden[: len(rows)])
    assert bool((grad_hidden[labels == -100] == 0).all())
    assert torch.equal(grad_weight, expected_weight)


def test_counted_rows_equal_all_rows(lane) -> None:
    """Within the rounding of another order of summation: fp32, sums of 70 exponentials and of 24 rows."""
    hidden, weight, labels, temperature, upstream = tensors(lane, 0.5)
    expected = step(lane, hidden, weight, labels, temperature, upstream)
    got = step(lane, hidden, weight, labels, temperature, upstream, counted_rows=TOKENS // 2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_only_the_counted_rows_are_projected(monkeypatch) -> None:
    """What the backend is given has that many rows; without the option, or with a bound that saves nothing, all."""
    seen, forward = [], torch_backend.forward
    monkeypatch.setattr(
        torch_backend, "forward", lambda problem, *rest: seen.append(problem.hidden.shape[0]) or forward(problem, *rest)
    )
    hidden, weight, labels, temperature, _ = tensors(TORCH, 0.5)
    for bound in (None, TOKENS, TOKENS + 9, TOKENS // 2, 15):
        linear_cross_entropy(hidden, weight, labels, temperature, counted_rows=bound)
    assert seen == [TOKENS, TOKENS, TOKENS, TOKENS // 2, 15]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_are_over_all_counted_rows(lane, reduction) -> None:
    hidden, weight, labels, temperature, _ = tensors(lane, 0.5)
    options = {"reduction": reduction, "backend": lane.backend}
    expected = linear_cross_entropy(hidden, weight, labels, temperature, **options)
    got = linear_cross_entropy(hidden, weight, labels, temperature, counted_rows=TOKENS // 2, **options)
    torch.testing.assert_close(got, expected)


def test_three_dimensions_and_another_ignore_index(lane) -> None:
    hidden, weight, labels, _, _ = tensors(lane, 0.5)
    shaped, other = hidden.view(4, 6, WIDTH), torch.where(labels == -100, 5, labels).view(4, 6)
    count = int((other != 5).sum())
    options = {"ignore_index": 5, "backend": lane.backend}
    expected = linear_cross_entropy(shaped, weight, other, 0.7, **options)
    got = linear_cross_entropy(shaped, weight, other, 0.7, counted_rows=count, **options)
    assert got[0].shape == (4, 6)
    torch.testing.assert_close(got, expected)


def test_rows_that_do_not_fit_are_poisoned(lane) -> None:
    hidden, weight, labels, temperature, _ = tensors(lane, 0.5)
    counted = (labels != -100).nonzero()[:, 0]
    options = {"counted_rows": len(counted) - 2, "backend": lane.backend}
    for output in linear_cross_entropy(hidden, weight, labels, temperature, **options):
        assert bool(output[counted[-2:]].isnan().all())
        assert not bool(output[counted[:-2]].isnan().any())
        assert bool((output[labels == -100] == 0).all())
    with pytest.raises(CallArgumentError, match="counted_rows is 10 and more labels"):
        linear_cross_entropy(hidden, weight, labels, temperature, check_labels=True, **options)
    policy = PolicyLoss("policy_gradient")
    w = weight.clone().requires_grad_()
    output = fused_linear_policy_loss(hidden, w, labels, torch.ones(TOKENS), policy, **options)
    output.loss.backward()
    assert output.loss.isnan()
    assert w.grad.isnan().any()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_folded_loss(lane, share) -> None:
    hidden, weight, labels, temperature, upstream = tensors(lane, share)
    advantages, old = upstream[0], upstream[1] - 4
    found = []
    for bound in (None, int(share * TOKENS) + 1):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        output = fused_linear_policy_loss(
            h,
            w,
            labels,
            advantages,
            PolicyLoss("ppo", entropy_coefficient=0.1),
            old_log_probs=old,
            temperature=temperature,
            denominator=5.0,
            counted_rows=bound,
            backend=lane.backend,
        )
        output.loss.backward()
        found.append((output.loss.detach(), output.log_probs, output.entropy, h.grad, w.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_repeats_are_bit_equal(lane) -> None:
    arguments = tensors(lane, 0.5)
    first, second = (step(lane, *arguments, counted_rows=14) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_bounds_that_cannot_be_meant_are_refused() -> None:
    hidden, weight, labels, _, _ = tensors(TORCH, 0.5)
    with pytest.raises(CallArgumentError, match="counted_rows is -1"):
        linear_cross_entropy(hidden, weight, labels, counted_rows=-1)
    with pytest.raises(CallTypeError, match="counted_rows"):
        linear_cross_entropy(hidden, weight, labels, counted_rows=torch.tensor(3))
