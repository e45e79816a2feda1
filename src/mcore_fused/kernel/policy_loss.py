"""A policy loss folded into the head: gradients are made in the forward, so nothing is computed twice.

Where the framework computes its loss on the stage that holds the head, the upstream gradient of each token is known as
soon as its log-prob and entropy are. Tokens are taken in chunks; a chunk's exponentials are kept, turned into dlogits
in place and multiplied out before the next chunk starts. Compared with :func:`linear_cross_entropy` this saves the
recomputation of the logits (a quarter of the arithmetic) *and* the memory of keeping them for all tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_fused.errors import CallArgumentError, CallTypeError
from mcore_fused.kernel.arguments import normalise_call
from mcore_fused.kernel.counted_rows import counted_call
from mcore_fused.kernel.dispatch import backend_module
from mcore_fused.kernel.launches import record_launch
from mcore_fused.kernel.main_grad import MainGrad
from mcore_fused.kernel.options import KernelOptions
from mcore_fused.kernel.problem import Problem, exact_products
from mcore_fused.kernel.schedule import token_chunks
from mcore_fused.kernel.tensor_parallel import VocabShard, find_shard, start_all_reduce

__all__ = ["PolicyLoss", "PolicyLossOutput", "TokenLoss", "fused_linear_policy_loss", "token_loss"]

DEFAULT_LOGITS_BYTES = 512 << 20


@dataclass(frozen=True)
class PolicyLoss:
    """Which loss, per token: ``surrogate - entropy_coefficient * entropy + kl_coefficient * kl``.

    Attributes:
        kind: "policy_gradient" is ``-advantage * log_prob``. "ppo" is the clipped surrogate
            ``-min(ratio * advantage, clip(ratio) * advantage)`` with ``ratio = exp(log_prob - old_log_prob)``; GRPO is
            the same with advantages normalised over a group by the caller and ``kl="k3"``.
        clip_low: the ratio is clipped at ``1 - clip_low``.
        clip_high: the ratio is clipped at ``1 + clip_high``.
        entropy_coefficient: weight of the entropy bonus.
        kl_coefficient: weight of the divergence from the reference policy; not 0 needs ``ref_log_probs``.
        kl: estimator of that divergence from one sample, with d = log_prob - ref_log_prob: "k1" is d, "k2" is d^2 / 2,
            "k3" is exp(-d) - 1 + d.
    """

    kind: Literal["policy_gradient", "ppo"] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        if self.kind not in ("policy_gradient", "ppo"):
            raise CallArgumentError(f"kind is {self.kind!r}", "choose 'policy_gradient' or 'ppo' (GRPO is 'ppo').")
        if self.kl not in ("k1", "k2", "k3"):
            raise CallArgumentError(f"kl is {self.kl!r}", "choose 'k1', 'k2' or 'k3'.")
        for name in ("clip_low", "clip_high", "entropy_coefficient", "kl_coefficient"):
            value = getattr(self, name)
            if not math.isfinite(value) or (name.startswith("clip") and value < 0):
                raise CallArgumentError(f"{name} is {value}", "pass a finite number; clips are not negative.")


@dataclass(frozen=True)
class PolicyLossOutput:
    """What a step needs, and what it wants to log.

    Attributes:
        loss: 0-dim fp32; the only one with a gradient, which can be taken once.
        log_probs: labels' shape, fp32, detached; 0 at ignored tokens.
        entropy: likewise.
        mean_kl: 0-dim, mean of the estimator over the counted tokens (0 without a reference).
        clip_fraction: 0-dim, part of the counted tokens whose surrogate is the clipped one.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor
    mean_kl: Tensor
    clip_fraction: Tensor


@dataclass(frozen=True)
class _Fold:
    """What a folded loss needs besides its tensors.

    Attributes:
        policy: the loss.
        options: options of the checked call.
        denominator: the sum of token losses is divided by it; None for the number of counted tokens.
        logits_bytes: memory for one chunk's exponentials.
        weight_grad_dtype: dtype in which the weight gradient is summed over token chunks.
        main_grad: where that sum goes, or None if autograd gets it.
    """

    policy: PolicyLoss
    options: KernelOptions
    denominator: float | None
    logits_bytes: int
    weight_grad_dtype: torch.dtype
    main_grad: MainGrad | None


@dataclass(frozen=True)
class TokenLoss:
    """Of each token: the loss, its derivative in the log-prob, the divergence estimate, whether the clip is active.

    The derivative in the entropy is the constant ``-entropy_coefficient``.
    """

    loss: Tensor
    by_log_prob: Tensor
    kl: Tensor | None
    clipped: Tensor | None


def token_loss(
    policy: PolicyLoss,
    log_probs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
) -> TokenLoss:
    """The loss of each token with its derivative, written out: a dozen small operations instead of a graph."""
    clipped = kl = None
    if policy.kind == "policy_gradient":
        loss, slope = -advantages * log_probs, -advantages
    else:
        assert old_log_probs is not None
        ratio = torch.exp(log_probs - old_log_probs)
        free = ratio * advantages
        bound = ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high) * advantages
        clipped = bound < free
        # the derivative of ratio * advantage in the log-prob is itself; the clipped one is constant
        loss, slope = -torch.minimum(free, bound), torch.where(clipped, 0.0, -free)
    if policy.entropy_coefficient:
        loss = torch.add(loss, entropy, alpha=-policy.entropy_coefficient)
    if ref_log_probs is not None:
        gap = log_probs - ref_log_probs
        if policy.kl == "k1":
            kl, kl_slope = gap, torch.ones_like(gap)
        elif policy.kl == "k2":
            kl, kl_slope = gap * gap / 2, gap
        else:
            kl_slope = -torch.expm1(-gap)
            kl = gap - kl_slope
        loss = torch.add(loss, kl, alpha=policy.kl_coefficient)
        slope = torch.add(slope, kl_slope, alpha=policy.kl_coefficient)
    return TokenLoss(loss, slope, kl, clipped)


def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    advantages: Tensor,
    policy: PolicyLoss,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    tp_group: Any = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    vocab_size: int | None = None,
    vocab_shard: tuple[int, int] | None = None,
    denominator: float | None = None,
    logits_bytes: int = DEFAULT_LOGITS_BYTES,
    weight_grad_dtype: torch.dtype | None = None,
    reduce_hidden_grad: bool = True,
    backend: str = "auto",
    gradient_accumulation_fusion: bool = False,
    counted_rows: int | None = None,
) -> PolicyLossOutput:
    """Policy loss of ``softmax(hidden @ weight.T * scale / temperature)``, gradients made in the forward.

    Args:
        hidden: as in :func:`linear_cross_entropy`, and so are ``weight``, ``labels``, ``temperature``, ``tp_group``,
            ``ignore_index``, ``scale``, ``vocab_size``, ``vocab_shard``, ``reduce_hidden_grad``, ``backend``,
            ``counted_rows`` and ``gradient_accumulation_fusion`` (the sum over token chunks is added to
            ``weight.main_grad`` in the backward).
        weight: see there.
        labels: see there; tokens that do not count hold ``ignore_index`` (this is the loss mask).
        advantages: labels' shape; no gradient flows into it.
        policy: which loss.
        old_log_probs: labels' shape; needed by "ppo".
        ref_log_probs: labels' shape; needed where ``kl_coefficient`` is not 0.
        temperature: see there.
        tp_group: see there.
        ignore_index: see there.
        scale: see there.
        vocab_size: see there.
        vocab_shard: see there.
        denominator: the sum of token losses is divided by it (gradient accumulation, sequence means); None divides by
            the number of counted tokens of this call, without reading it on the host.
        logits_bytes: memory for one chunk's exponentials, in the inputs' dtype. Larger chunks are faster.
        weight_grad_dtype: the weight gradient is summed over the token chunks in this dtype and returned in the
            weight's. None is the weight's own: no extra memory, one rounding a chunk. fp32 costs 4 bytes a weight.
        reduce_hidden_grad: see there.
        backend: see there.
        gradient_accumulation_fusion: see there.
        counted_rows: see there; if more rows count than fit, the loss and the gradients are NaN.

    Returns:
        The loss and the detached values that are logged.

    Raises:
        CallArgumentError: shapes or values that fit nothing; a missing ``old_log_probs`` or ``ref_log_probs``.
        CallTypeError: wrong types or dtypes.
    """
    options = KernelOptions(
        temperature,
        tp_group=tp_group,
        ignore_index=ignore_index,
        scale=scale,
        vocab_size=vocab_size,
        vocab_shard=vocab_shard,
        logits_budget_bytes=logits_bytes,
        reduce_hidden_grad=reduce_hidden_grad,
        backend=backend,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        counted_rows=counted_rows,
    )
    call, rows = counted_call(normalise_call(hidden, weight, labels, options))
    tokens = _per_token(call.shape, advantages=advantages, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    if policy.kind == "ppo" and old_log_probs is None:
        raise CallArgumentError("old_log_probs is missing", "'ppo' compares with the policy that sampled the tokens.")
    if policy.kl_coefficient != 0 and ref_log_probs is None:
        raise CallArgumentError("ref_log_probs is missing", "pass them, or set kl_coefficient to 0.")
    if denominator is not None and not denominator > 0:
        raise CallArgumentError(f"denominator is {denominator}", "pass a number above 0, or None for the mean.")
    fold = _Fold(
        policy,
        call.options,
        denominator,
        logits_bytes,
        call.weight.dtype if weight_grad_dtype is None else weight_grad_dtype,
        call.main_grad,
    )
    need = torch.is_grad_enabled()
    overflow = None
    if rows is not None:
        tokens, overflow = tuple(None if value is None else rows.gather(value) for value in tokens), rows.overflow
    loss, log_probs, entropy, mean_kl, clip_fraction = _FoldedLoss.apply(
        call.hidden, call.weight, call.labels, call.logit_scale, tokens, overflow, fold, need
    )
    if rows is not None:
        log_probs, entropy = rows.scatter(log_probs), rows.scatter(entropy)
    return PolicyLossOutput(loss, log_probs.view(call.shape), entropy.view(call.shape), mean_kl, clip_fraction)


def _per_token(shape: torch.Size, **tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    for name, value in tensors.items():
        if value is None:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise CallTypeError(f"{name} is not a floating-point tensor", "pass one value a token.")
        if value.shape != shape:
            raise CallArgumentError(
                f"{name} has shape {list(value.shape)} and labels {list(shape)}", "give it the labels' shape."
            )
    return tuple(None if value is None else value.detach().reshape(-1) for value in tensors.values())


class _FoldedLoss(torch.autograd.Function):
    """Makes both gradients in forward; backward multiplies them by the upstream scalar, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        logit_scale: float | Tensor,
        tokens: tuple[Tensor | None, ...],
        overflow: Tensor | None,
        fold: _Fold,
        need: bool,
    ) -> tuple[Tensor, ...]:
        needs = (need and hidden.requires_grad, need and weight.requires_grad)
        with exact_products(hidden.device):
            walk = _TokenWalk(hidden.detach(), weight.detach(), labels, logit_scale, tokens, overflow, fold, needs)
            outputs = walk.run()
        ctx.gradients = (walk.grad_hidden, walk.grad_weight)
        ctx.backend, ctx.main_grad = walk.backend, fold.main_grad
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise CallArgumentError(
                "the folded loss was differentiated twice", "its gradients were consumed; call it again."
            )
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        if grad_loss is None:
            return (None,) * 8
        main_grad: MainGrad | None = ctx.main_grad
        with exact_products(grad_loss.device):
            if main_grad is not None and grad_weight is not None:
                main_grad.open().addcmul_(grad_weight, grad_loss)
                grad_weight = main_grad.close(ctx.weight_dtype)
            elif grad_weight is not None:
                ctx.backend.scale_in_place(grad_weight, grad_loss)
            if grad_hidden is not None:
                ctx.backend.scale_in_place(grad_hidden, grad_loss)
        return grad_hidden, grad_weight, None, None, None, None, None, None


class _TokenWalk:
    """The walk over token chunks."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        logit_scale: float | Tensor,
        tokens: tuple[Tensor | None, ...],
        overflow: Tensor | None,
        fold: _Fold,
        needs: tuple[bool, bool],
    ) -> None:
        self.hidden, self.weight, self.labels, self.logit_scale = hidden, weight, labels, logit_scale
        self.tokens, self.fold, self.options = tokens, fold, fold.options
        self.need_hidden, self.need_weight = needs
        self.backend = backend_module(fold.options.backend)
        self.counted = labels != fold.options.ignore_index
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = self.counted.sum().to(exact)
        self.share = 1 / count if fold.denominator is None else torch.full_like(count, 1 / fold.denominator)
        if overflow is not None:  # rows that count are left out: no number of this call may be used
            self.share = torch.where(overflow, torch.nan, self.share)
        self.count = count
        self.grad_hidden: Tensor | None = None
        self.grad_weight: Tensor | None = None

    def run(self) -> tuple[Tensor, ...]:
        options = self.options
        shard = find_shard(self.weight.shape[0], options.tp_group, options.vocab_shard, self.hidden.device)
        real_rows = shard.real_rows(options.vocab_size)
        pieces = token_chunks(self.hidden.shape[0], real_rows, self.hidden.element_size(), self.fold.logits_bytes)
        done = [self._chunk(first, end, shard, real_rows) for first, end in pieces]
        if self.grad_weight is not None and self.fold.main_grad is None:
            self.grad_weight = self.grad_weight.to(self.weight.dtype)
        log_probs, entropy, loss, kl, clipped = (_joined(column) for column in zip(*done, strict=True))
        assert log_probs is not None
        assert entropy is not None
        return (
            self._total(loss) * self.share,
            log_probs,
            entropy,
            self._total(kl) / self.count,
            self._total(clipped) / self.count,
        )

    def _total(self, values: Tensor | None) -> Tensor:
        # at ignored tokens the caller's values may be anything
        return self.count.new_zeros(()) if values is None else torch.where(self.counted, values, 0.0).sum()

    def _chunk(self, first: int, end: int, shard: VocabShard, real_rows: int) -> tuple[Tensor | None, ...]:
        options, policy = self.options, self.fold.policy
        scale = self.logit_scale[first:end] if isinstance(self.logit_scale, Tensor) else self.logit_scale
        start, labels = shard.labels_for(options.backend, self.labels[first:end], options.ignore_index, real_rows)
        problem = Problem(self.hidden[first:end], self.weight, scale, options, real_rows, start)
        wanted = self.need_hidden or self.need_weight
        outcome = self.backend.forward(
            problem,
            labels,
            # whatever the chunk needs: token_chunks has fitted it into the budget
            1 << 62 if wanted else 0,
        )
        record_launch(outcome.path, interpreted=self.hidden.device.type == "cpu" and outcome.path != "torch")
        values = [None if value is None else value[first:end].to(outcome.entropy.dtype) for value in self.tokens]
        token = token_loss(policy, outcome.log_probs, outcome.entropy, *values)  # type: ignore[arg-type]
        if wanted:
            bonus = policy.entropy_coefficient
            by_entropy = (self.share * -bonus).expand(end - first) if bonus else None
            self._products(problem, outcome, (token.by_log_prob * self.share, by_entropy), first, end)
        clipped = None if token.clipped is None else token.clipped.to(token.loss.dtype)
        return (outcome.log_probs, outcome.entropy, token.loss, token.kl, clipped)

    def _products(
        self, problem: Problem, outcome: Any, upstream: tuple[Tensor | None, ...], first: int, end: int
    ) -> None:
        group = self.options.tp_group if self.options.reduce_hidden_grad else None
        grad_hidden, self.grad_weight = self.backend.gradients(
            problem,
            outcome.labels,
            outcome.rows,
            outcome.kept,
            upstream,
            need_hidden=self.need_hidden,
            need_weight=self.need_weight,
            reduce_hidden=lambda value: start_all_reduce(value, group),
            workspace_bytes=self.fold.logits_bytes,
            weight_total=self.grad_weight,
            weight_grad_dtype=self.fold.weight_grad_dtype,
        )
        if grad_hidden is None:
            return
        if grad_hidden.shape == self.hidden.shape:  # one chunk: no copy
            self.grad_hidden = grad_hidden
            return
        if self.grad_hidden is None:
            self.grad_hidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
        self.grad_hidden[first:end] = grad_hidden


def _joined(pieces: tuple[Tensor | None, ...]) -> Tensor | None:
    """The chunks' values of one kind, which are all there or all absent."""
    present = [piece for piece in pieces if piece is not None]
    if not present:
        return None
    return present[0] if len(present) == 1 else torch.cat(present)
