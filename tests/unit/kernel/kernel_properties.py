"""What the kernel promises, as checks against float64 with bounds from error analysis. Shared by all lanes.

Bounds, with u the unit roundoff of fp32 (2^-24) or fp64, h the one of the inputs' dtype:

* a logit z = sum of H products is off by at most (H + 8) * u' * sum |x||y|, whatever the order of summation; u' is
  4u to cover the accumulator of tensor cores, which truncates, and the dropped term of tf32x3;
* a log-prob is the difference of two logits-like numbers, so twice that, plus a few u of its terms;
* the entropy's derivative in the logits has an l1 norm below 2 (1 + ln V);
* dlogits are rounded once to the inputs' dtype (twice where exponentials were kept), and the results once more, so a
  gradient element is off by h * sum |d||w| plus h of itself, plus what the logits' error makes of d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st

from mcore_fused.kernel import linear_cross_entropy

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Smallest normal fp16 times its roundoff: what underflow may lose of one dlogit.
UNDERFLOW = {torch.float64: 0.0, torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}


@dataclass(frozen=True)
class Case:
    """One call, generated from a seed."""

    tokens: int = 5
    width: int = 8
    rows: int = 40
    dtype: torch.dtype = torch.float32
    std: float = 2.0
    offset: float = 0.0
    temperature: float | str = 1.0  # or "tensor"
    scale: float = 1.0
    padding: int = 0
    ignored: float = 0.2
    upstream: tuple[str, str] = ("random", "random")
    kept: float = 0.0  # part of the vocabulary
    chunk_columns: int = 0  # 0: the default workspace
    layout: str = "plain"
    three_d: bool = False
    label_dtype: torch.dtype = torch.int64
    train: tuple[bool, bool] = (True, True)
    seed: int = 0


@dataclass
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    temperature: float | torch.Tensor
    upstream: list[torch.Tensor | None]
    options: dict = field(default_factory=dict)


def strided(value: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers in another layout."""
    if how == "transposed":
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "sliced":  # rows further apart than they are long, off the 16-byte grid
        wide = torch.full((*value.shape[:-1], value.shape[-1] + 3), math.nan, dtype=value.dtype, device=value.device)
        wide[..., 1 : value.shape[-1] + 1] = value
        return wide[..., 1 : value.shape[-1] + 1]
    if how == "every second":
        filler = math.nan if value.is_floating_point() else 2**30
        wide = torch.full((2 * value.shape[0], *value.shape[1:]), filler, dtype=value.dtype, device=value.device)
        wide[::2] = value
        return wide[::2]
    return value


def make_upstream(kind: str, shape: torch.Size, dtype: torch.dtype, rng: torch.Generator, device: str):
    """None, or an upstream gradient of that kind; "random" holds distinct weights, some exactly 0 (K4)."""
    if kind == "none":
        return None
    if kind == "zero":
        return torch.zeros(shape, dtype=dtype, device=device)
    if kind == "stride 0":
        return torch.ones((), dtype=dtype, device=device).expand(shape)
    value = torch.randn(shape, generator=rng, dtype=dtype)
    value[torch.rand(shape, generator=rng) < 0.2] = 0.0
    value = value.to(device)
    return strided(value, "every second") if kind == "strided" and value.dim() and value.shape[0] else value


def make_inputs(case: Case, device: str) -> Inputs:
    rng = torch.Generator().manual_seed(case.seed)
    shape = (case.tokens, 2) if case.three_d else (case.tokens,)
    hidden = torch.randn((*shape, case.width), generator=rng)
    weight = torch.randn((case.rows + case.padding, case.width), generator=rng) * (case.std / math.sqrt(case.width))
    if case.offset:  # one more hidden unit carries a common offset of all logits
        hidden[..., 0] = 1.0
        weight[:, 0] = case.offset
    labels = torch.randint(0, case.rows, shape, generator=rng)
    labels[torch.rand(shape, generator=rng) < case.ignored] = -100
    temperature: float | torch.Tensor
    if case.temperature == "tensor":
        temperature = (torch.rand(shape, generator=rng) * 1.5 + 0.5).masked_fill_(labels == -100, 0.0).to(device)
    else:
        temperature = float(case.temperature)
    if case.padding:
        weight[case.rows :] = 1e4  # would win every softmax if it counted
    out_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    options: dict = {"scale": case.scale}
    if case.padding:
        options["vocab_size"] = case.rows
    count = math.prod(shape)
    item = torch.empty(0, dtype=case.dtype).element_size()
    if case.kept:
        options["logits_budget_bytes"] = int(case.kept * count * (case.rows + 256) * (item + 4 / 16)) + 1
    if case.chunk_columns:
        options["workspace_bytes"] = case.chunk_columns * item * count
    return Inputs(
        strided(hidden.to(device, case.dtype), case.layout).requires_grad_(case.train[0]),
        strided(weight.to(device, case.dtype), case.layout).requires_grad_(case.train[1]),
        strided(labels.to(device, case.label_dtype), "every second" if case.layout != "plain" else "plain"),
        temperature,
        [make_upstream(kind, torch.Size(shape), out_dtype, rng, device) for kind in case.upstream],
        options,
    )


def run(case: Case, inputs: Inputs, backend: str):
    """Outputs and the gradients asked for."""
    outputs = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.labels, inputs.temperature, backend=backend, **inputs.options
    )
    wanted = [x for x, train in zip((inputs.hidden, inputs.weight), case.train, strict=True) if train]
    pairs = [(o, g) for o, g in zip(outputs, inputs.upstream, strict=True) if g is not None]
    plain = [o.detach() for o in outputs]
    if not wanted or not pairs:
        return plain, []
    grads = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs])
    return plain, list(grads)


@dataclass
class Expected:
    log_probs: torch.Tensor
    entropy: torch.Tensor
    log_p: torch.Tensor  # of all real vocabulary rows
    dlogits: torch.Tensor  # of the raw logits, before scale and temperature
    hidden: torch.Tensor
    weight: torch.Tensor
    grads: list[torch.Tensor]


def expect(case: Case, inputs: Inputs) -> Expected:
    """The definition in float64 by ordinary autograd, with the raw logits as a leaf so that dlogits are seen."""
    hidden = inputs.hidden.detach().double().reshape(-1, case.width)
    weight = inputs.weight.detach().double()
    labels = inputs.labels.reshape(-1).long()
    raw = (hidden @ weight.T).requires_grad_()
    z = raw[:, : case.rows] * case.scale
    divisor = torch.as_tensor(inputs.temperature, dtype=torch.float64, device=raw.device).expand(inputs.labels.shape)
    divisor = torch.where(labels == -100, 1.0, divisor.reshape(-1))
    log_p = torch.log_softmax(z / divisor[:, None], -1)
    ignored = labels == -100
    log_probs = torch.where(ignored, 0.0, log_p.gather(1, torch.where(ignored, 0, labels)[:, None])[:, 0])
    entropy = torch.where(ignored, 0.0, -(log_p.exp() * log_p).sum(-1))
    total = sum(
        (
            (o * g.reshape(-1).double()).sum()
            for o, g in zip((log_probs, entropy), inputs.upstream, strict=True)
            if g is not None
        ),
        torch.zeros((), dtype=torch.float64, device=raw.device) * raw.sum(),
    )
    (dlogits,) = torch.autograd.grad(total, raw)
    shape = inputs.labels.shape
    grads = []
    if case.train[0]:
        grads.append((dlogits @ weight).view(inputs.hidden.shape))
    if case.train[1]:
        grads.append(dlogits.T @ hidden)
    outputs = log_probs.detach().view(shape), entropy.detach().view(shape)
    return Expected(*outputs, log_p.detach(), dlogits, hidden, weight, grads)


def check(case: Case, device: str, backend: str) -> None:
    """Outputs and gradients within the bounds of the module's docstring; invariants everywhere."""
    inputs = make_inputs(case, device)
    outputs, grads = run(case, inputs, backend)
    expected = expect(case, inputs)
    exact = case.dtype == torch.float64
    out_dtype = torch.float64 if exact else torch.float32
    u = UNIT[out_dtype]
    half = UNIT[case.dtype]
    for output in outputs:
        assert output.dtype == out_dtype
        assert output.shape == inputs.labels.shape
    lowest = 0.5 if case.temperature == "tensor" else float(case.temperature)
    magnitude = expected.hidden.abs() @ expected.weight[: case.rows].abs().T * abs(case.scale) / lowest
    biggest = float(magnitude.max()) if magnitude.numel() else 0.0
    dz = (case.width + 8) * 4 * u * biggest + 4 * u * biggest
    ln_v = math.log(case.rows)
    tiny = 64 * u * (1 + ln_v)
    lp_bound, ent_bound = 2 * dz + tiny, 2 * (1 + ln_v) * dz + tiny
    if expected.log_probs.numel():
        assert float((outputs[0].double() - expected.log_probs).abs().max()) <= lp_bound
        assert float((outputs[1].double() - expected.entropy).abs().max()) <= ent_bound
    # K1: a log-prob is never positive, an entropy never negative nor above ln V
    assert bool((outputs[0] <= 0).all())
    assert bool((outputs[1] >= 0).all())
    assert bool((outputs[1] <= ln_v + ent_bound).all())
    ignored = inputs.labels == -100
    assert bool((outputs[0][ignored] == 0).all())  # K5
    assert bool((outputs[1][ignored] == 0).all())
    if not grads:
        return
    roundings = (2 if case.kept else 1) + 1
    d = expected.dlogits
    strength = sum(g.abs().double().reshape(-1) for g in inputs.upstream if g is not None) * abs(case.scale) / lowest
    # p and the entropy are off as bounded above; d is linear in both, with factors log p + entropy and 1
    p = expected.log_p.exp()
    spread = (expected.log_p + expected.entropy.reshape(-1, 1)).abs()
    relative = (2 * dz + tiny) * (4 + spread + 2 * (1 + ln_v))
    d_error = roundings * half * d.abs() + UNDERFLOW[case.dtype]
    d_error[:, : case.rows] += strength[:, None] * p * relative
    rows = torch.arange(d.shape[0], device=d.device)
    d_error[rows, inputs.labels.reshape(-1).long().clamp(min=0)] += 16 * u * strength
    d_error[ignored.reshape(-1)] = 0.0
    d_error[:, case.rows :] = 0.0
    wanted = iter(zip(grads, expected.grads, strict=True))
    gemm = 4 * (max(d.shape) + 8) * u
    if case.train[0]:
        got, want = next(wanted)
        bound = d_error @ expected.weight.abs() + gemm * (d.abs() @ expected.weight.abs())
        _within(got.reshape(bound.shape), want.reshape(bound.shape), bound, half, UNDERFLOW[case.dtype])
        assert bool((got[ignored] == 0).all())
        assert got.dtype == case.dtype
    if case.train[1]:
        got, want = next(wanted)
        bound = d_error.T @ expected.hidden.abs() + gemm * (d.abs().T @ expected.hidden.abs())
        _within(got, want, bound, half, UNDERFLOW[case.dtype])
        assert bool((got[case.rows :] == 0).all())


def _within(got, want, bound, half, underflow) -> None:
    excess = (got.double() - want).abs() - (bound + half * want.abs() + underflow)
    assert not bool(torch.isnan(got).any())
    assert excess.numel() == 0 or float(excess.max()) <= 0, f"gradient exceeds its bound by {float(excess.max()):.3e}"


def cases(dtypes, *, max_tokens: int, max_width: int, max_rows: int) -> st.SearchStrategy[Case]:
    """Calls of every kind: sizes on and off tile edges, all options, all layouts."""
    edges = (0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513)
    kinds = st.sampled_from(["random", "random", "strided", "stride 0", "zero", "none"])

    def size(low: int, high: int) -> st.SearchStrategy[int]:
        near = [n for n in edges if low <= n <= high]
        return st.one_of(st.sampled_from(near), st.integers(low, high)) if near else st.integers(low, high)

    return st.builds(
        Case,
        tokens=size(0, max_tokens),
        width=size(1, max_width),
        rows=size(1, max_rows),
        dtype=st.sampled_from(dtypes),
        std=st.sampled_from([0.0, 2.0, 20.0]),
        temperature=st.one_of(st.just("tensor"), st.sampled_from([0.5, 1.0, 2.0])),
        scale=st.sampled_from([1.0, 0.25, -0.5, 0.0]),
        padding=st.sampled_from([0, 0, 1, 40]),
        ignored=st.sampled_from([0.0, 0.3, 1.0]),
        upstream=st.tuples(kinds, kinds),
        kept=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
        chunk_columns=st.sampled_from([0, 1, 300]),
        layout=st.sampled_from(["plain", "plain", "transposed", "sliced", "every second"]),
        three_d=st.booleans(),
        label_dtype=st.sampled_from([torch.int64, torch.int32]),
        train=st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
        seed=st.integers(0, 2**31),
    )


__all__ = ["Case", "Inputs", "cases", "check", "expect", "make_inputs", "make_upstream", "replace", "run", "strided"]
