"""``linear_cross_entropy``: log-probs and entropies of ``softmax(hidden @ weight.T * scale / temperature)``.

The public function checks, chooses the path and owns the autograd function; the arithmetic lives in the backends.
``[tokens, vocabulary]`` is never held by any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel.arguments import BACKENDS, REDUCTIONS, normalise_call
from mcore_fused.kernel.dispatch import backend_module, choose_path
from mcore_fused.kernel.launches import record_launch
from mcore_fused.kernel.problem import Problem, exact_products
from mcore_fused.kernel.schedule import DEFAULT_WORKSPACE_BYTES
from mcore_fused.kernel.tensor_parallel import (
    active_group,
    find_shard,
    start_all_reduce,
)

__all__ = ["linear_cross_entropy"]


@dataclass(frozen=True)
class _Plan:
    """What a call needs besides its tensors."""

    path: str
    ignore_index: int
    vocab_size: int | None
    group: dist.ProcessGroup | None
    vocab_shard: tuple[int, int] | None
    reduce_hidden_grad: bool
    check_labels: bool
    keep_bytes: int
    workspace_bytes: int


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    tp_group: Any = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    vocab_size: int | None = None,
    vocab_shard: tuple[int, int] | None = None,
    logits_budget_bytes: int = 0,
    reduce_hidden_grad: bool = True,
    check_labels: bool = False,
    backend: str = "auto",
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each row, without holding the logits.

    Args:
        hidden: ``[tokens, H]`` or ``[a, b, H]``; bf16, fp16, fp32 or fp64; any strides (a layout that the device
            cannot read in rows costs one copy).
        weight: ``[V, H]``, this rank's vocabulary rows; same dtypes. Different dtypes are promoted as torch does
            (bf16 with fp32 computes in fp32); autocast casts both, as it does for a linear layer. fp32 is true fp32.
        labels: integers of shape ``hidden.shape[:-1]``, ids in the global vocabulary.
        temperature: finite and above 0: a number, or a tensor of the labels' shape. Divides the logits in fp32. On
            an accelerator a tensor's values are only read with ``check_labels``; a bad one gives NaN in its row.
        reduction: "none", or "sum" / "mean" over the tokens that are not ignored (mean over none of them is NaN).
        tp_group: torch.distributed group over which the vocabulary is sharded in rank order; shards may differ in
            size. Every rank passes the same hidden states and labels.
        ignore_index: a row with this label gives exactly 0 and 0, and no gradient.
        scale: logit multiplier (MuP), applied before the temperature.
        vocab_size: rows of the global weight that are real; padding rows beyond it take no part. With ``tp_group``
            and without ``vocab_shard`` this reads the shard sizes on the host.
        vocab_shard: first global row of this rank's weight, and the rows of all ranks together. None asks the other
            ranks: one small all-gather more a call. All ranks pass it, or none does.
        logits_budget_bytes: memory that the forward may keep so that the backward recomputes less. It is rounded
            down to whole vocabulary chunks; too small a budget keeps nothing.
        reduce_hidden_grad: sum the hidden gradient over ``tp_group``. False where the caller's own layers do it.
        check_labels: read labels and per-token temperatures on the host and refuse bad ones. Stops the host until
            the device is idle. Without it a bad label gives a NaN log-prob and never touches memory.
        backend: "auto" takes Triton on a GPU that has it, torch otherwise. "triton" on CPU needs Triton's
            interpreter (``TRITON_INTERPRET=1``).
        workspace_bytes: memory of the backward beyond the gradients themselves (one chunk of dlogits and, with more
            than one chunk, the fp32 hidden gradient). Smaller chunks cost time: about 1% at half of the default.

    Returns:
        ``(log_probs, entropy)`` in nats, fp32 (fp64 for fp64 inputs), of the labels' shape, or 0-dim if reduced.
        Differentiable in hidden and weight through both, once. Bit-equal when repeated.

    Raises:
        CallArgumentError: shapes, devices, values or names that fit nothing.
        CallTypeError: wrong types or dtypes.
    """
    arguments = (hidden, weight, labels, temperature, reduction, tp_group, ignore_index, scale, vocab_size)
    options = (vocab_shard, logits_budget_bytes, reduce_hidden_grad, check_labels, backend, workspace_bytes)
    if torch.compiler.is_compiling():
        # one graph break at the door: what follows launches kernels and collectives on its own schedule
        return _compute_uncompiled(*arguments, *options)
    return _compute(*arguments, *options)


def _compute(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    reduction: str,
    tp_group: Any,
    ignore_index: int,
    scale: float,
    vocab_size: int | None,
    vocab_shard: tuple[int, int] | None,
    logits_budget_bytes: int,
    reduce_hidden_grad: bool,
    check_labels: bool,
    backend: str,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    if backend not in BACKENDS:
        raise CallArgumentError(f"backend is {backend!r}", f"choose one of {', '.join(BACKENDS)}.")
    if reduction not in REDUCTIONS:
        raise CallArgumentError(f"reduction is {reduction!r}", f"choose one of {', '.join(REDUCTIONS)}.")
    group = active_group(tp_group)
    call = normalise_call(
        hidden,
        weight,
        labels,
        temperature,
        ignore_index=ignore_index,
        scale=scale,
        vocab_size=vocab_size,
        logits_budget_bytes=logits_budget_bytes,
        workspace_bytes=workspace_bytes,
        check_values=check_labels,
    )
    differentiable = torch.is_grad_enabled() and (call.hidden.requires_grad or call.weight.requires_grad)
    plan = _Plan(
        path=choose_path(call, backend),
        ignore_index=call.ignore_index,
        vocab_size=call.vocab_size,
        group=group,
        vocab_shard=vocab_shard,
        reduce_hidden_grad=reduce_hidden_grad,
        check_labels=check_labels,
        keep_bytes=call.logits_budget_bytes if differentiable else 0,
        workspace_bytes=call.workspace_bytes,
    )
    log_probs, entropy = _LinearCrossEntropy.apply(call.hidden, call.weight, call.labels, call.logit_scale, plan)
    if reduction == "none":
        return log_probs.view(call.shape), entropy.view(call.shape)
    if reduction == "sum":
        return log_probs.sum(), entropy.sum()
    counted = (call.labels != call.ignore_index).sum()
    return log_probs.sum() / counted, entropy.sum() / counted


# The decorator torch uses on its own optimisers: it imports the compiler only when something is being compiled.
_compute_uncompiled = torch._disable_dynamo(_compute)  # type: ignore[attr-defined]  # noqa: SLF001


class _LinearCrossEntropy(torch.autograd.Function):
    """Inputs are in normal form (arguments.py); the last two are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, logit_scale: float | Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        backend = backend_module(plan.path)
        with exact_products(hidden.device):
            shard = find_shard(weight.shape[0], plan.group, plan.vocab_shard, hidden.device)
            if plan.check_labels:
                _refuse_bad_labels(labels, plan.ignore_index, shard.vocabulary(plan.vocab_size))
            real_rows = shard.real_rows(plan.vocab_size)
            start, backend_labels = shard.labels_for(plan.path, labels, plan.ignore_index, real_rows)
            problem = Problem(hidden, weight, logit_scale, real_rows, plan.ignore_index, plan.group, start)
            outcome = backend.forward(problem, backend_labels, plan.keep_bytes)
        record_launch(outcome.path, interpreted=hidden.device.type == "cpu" and outcome.path != "torch")
        per_row = isinstance(logit_scale, Tensor)
        ctx.save_for_backward(hidden, weight, outcome.labels, logit_scale if per_row else None, *outcome.rows)
        ctx.plan, ctx.real_rows, ctx.start, ctx.logit_scale = plan, real_rows, start, None if per_row else logit_scale
        ctx.kept = outcome.kept
        ctx.set_materialize_grads(False)
        return outcome.log_probs, outcome.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, row_scale, *rows = ctx.saved_tensors
        plan: _Plan = ctx.plan
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        kept, ctx.kept = ctx.kept, None  # consumed in place; a second backward recomputes
        logit_scale = ctx.logit_scale if row_scale is None else row_scale
        problem = Problem(hidden, weight, logit_scale, ctx.real_rows, plan.ignore_index, plan.group, ctx.start)
        group = plan.group if plan.reduce_hidden_grad else None
        with exact_products(hidden.device):
            grad_hidden, grad_weight = backend_module(plan.path).gradients(
                problem,
                labels,
                tuple(rows),
                kept,
                (grad_log_probs, grad_entropy),
                need_hidden=need_hidden,
                need_weight=need_weight,
                reduce_hidden=lambda value: start_all_reduce(value, group),
                workspace_bytes=plan.workspace_bytes,
            )
        return grad_hidden, grad_weight, None, None, None


def _refuse_bad_labels(labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if bool(bad.any()):
        position = int(bad.nonzero()[0, 0])
        raise CallArgumentError(
            f"label {int(labels[position])} at token {position} is outside the vocabulary of {vocabulary}",
            f"pass ids below {vocabulary}, or ignore_index ({ignore_index}) for tokens that do not count.",
        )
