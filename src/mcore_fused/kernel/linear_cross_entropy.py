"""``linear_cross_entropy``: log-probs and entropies of ``softmax(hidden @ weight.T * scale / temperature)``.

The public function checks, chooses the path and owns the autograd function; the arithmetic lives in the backends.
``[tokens, vocabulary]`` is never held by any of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel.arguments import normalise_call
from mcore_fused.kernel.counted_rows import counted_call
from mcore_fused.kernel.dispatch import backend_module
from mcore_fused.kernel.launches import record_launch
from mcore_fused.kernel.main_grad import MainGrad
from mcore_fused.kernel.options import KernelOptions
from mcore_fused.kernel.problem import Problem, exact_products
from mcore_fused.kernel.schedule import DEFAULT_WORKSPACE_BYTES
from mcore_fused.kernel.tensor_parallel import find_shard, start_all_reduce

__all__ = ["linear_cross_entropy"]


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
    gradient_accumulation_fusion: bool = False,
    counted_rows: int | None = None,
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
            ranks: one more small all-gather per call. All ranks pass it, or none does.
        logits_budget_bytes: memory that the forward may keep so that the backward recomputes less. It is rounded
            down to whole vocabulary chunks; too small a budget keeps nothing.
        reduce_hidden_grad: sum the hidden gradient over ``tp_group``. False where the caller's own layers do it.
        check_labels: read labels and per-token temperatures on the host and refuse bad ones. Stops the host until
            the device is idle. Without it a bad label gives a NaN log-prob and never touches memory.
        backend: "auto" takes Triton on a GPU that has it, torch otherwise. "triton" on CPU needs Triton's
            interpreter (``TRITON_INTERPRET=1``).
        workspace_bytes: memory of the backward beyond the gradients themselves (one chunk of dlogits and, with more
            than one chunk, the fp32 hidden gradient). Smaller chunks cost time: about 1% at half of the default.
        gradient_accumulation_fusion: as in Megatron: the backward adds the weight gradient to ``weight.main_grad``
            (fp32 or half precision), sets ``weight.grad_added_to_main_grad``, and hands autograd a dummy, of zeros with
            ``weight.zero_out_wgrad``.
        counted_rows: number of labels that are not ``ignore_index``, or an upper bound of it, on the host. Only as
            many rows are projected; None projects all. Rows that count and do not fit get NaN, and an error with
            ``check_labels``. Under tensor parallelism all ranks pass the same number.

    Returns:
        ``(log_probs, entropy)`` in nats, fp32 (fp64 for fp64 inputs), of the labels' shape, or 0-dim if reduced.
        Differentiable in hidden and weight through both, once. Bit-equal when repeated.

    Raises:
        CallArgumentError: shapes, devices, values or names that fit nothing.
        CallTypeError: wrong types or dtypes.
    """
    options = KernelOptions(
        temperature,
        reduction,
        tp_group,
        ignore_index,
        scale,
        vocab_size,
        vocab_shard,
        logits_budget_bytes,
        reduce_hidden_grad,
        check_labels,
        backend,
        workspace_bytes,
        gradient_accumulation_fusion,
        counted_rows,
    )
    if torch.compiler.is_compiling():
        # one graph break at the door: what follows launches kernels and collectives on its own schedule
        return _compute_uncompiled(hidden, weight, labels, options)
    return _compute(hidden, weight, labels, options)


def _compute(hidden: Tensor, weight: Tensor, labels: Tensor, options: KernelOptions) -> tuple[Tensor, Tensor]:
    whole = normalise_call(hidden, weight, labels, options)
    call, rows = counted_call(whole)
    log_probs, entropy = _LinearCrossEntropy.apply(
        call.hidden, call.weight, call.labels, call.logit_scale, call.options, call.main_grad
    )
    if rows is not None:
        log_probs, entropy = rows.scatter(log_probs), rows.scatter(entropy)
    if options.reduction == "none":
        return log_probs.view(call.shape), entropy.view(call.shape)
    if options.reduction == "sum":
        return log_probs.sum(), entropy.sum()
    counted = (whole.labels != options.ignore_index).sum()
    return log_probs.sum() / counted, entropy.sum() / counted


# The decorator torch uses on its own optimisers: it imports the compiler only when something is being compiled.
_compute_uncompiled = torch._disable_dynamo(_compute)  # type: ignore[attr-defined]  # noqa: SLF001


class _LinearCrossEntropy(torch.autograd.Function):
    """Inputs are in normal form (arguments.py); the last three are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        logit_scale: float | Tensor,
        options: KernelOptions,
        main_grad: MainGrad | None,
    ) -> tuple[Tensor, Tensor]:
        backend = backend_module(options.backend)
        with exact_products(hidden.device):
            shard = find_shard(weight.shape[0], options.tp_group, options.vocab_shard, hidden.device)
            if options.check_labels:
                _refuse_bad_labels(labels, options.ignore_index, shard.vocabulary(options.vocab_size))
            real_rows = shard.real_rows(options.vocab_size)
            start, backend_labels = shard.labels_for(options.backend, labels, options.ignore_index, real_rows)
            problem = Problem(hidden, weight, logit_scale, options, real_rows, start)
            outcome = backend.forward(problem, backend_labels, options.logits_budget_bytes)
        record_launch(outcome.path, interpreted=hidden.device.type == "cpu" and outcome.path != "torch")
        per_row = isinstance(logit_scale, Tensor)
        ctx.save_for_backward(hidden, weight, outcome.labels, logit_scale if per_row else None, *outcome.rows)
        ctx.options, ctx.real_rows, ctx.start = options, real_rows, start
        ctx.logit_scale = None if per_row else logit_scale
        ctx.kept, ctx.main_grad = outcome.kept, main_grad
        ctx.set_materialize_grads(False)
        return outcome.log_probs, outcome.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, row_scale, *rows = ctx.saved_tensors
        options: KernelOptions = ctx.options
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        kept, ctx.kept = ctx.kept, None  # consumed in place; a second backward recomputes
        logit_scale = ctx.logit_scale if row_scale is None else row_scale
        problem = Problem(hidden, weight, logit_scale, options, ctx.real_rows, ctx.start)
        group = options.tp_group if options.reduce_hidden_grad else None
        main_grad: MainGrad | None = ctx.main_grad if need_weight else None
        with exact_products(hidden.device):
            grad_hidden, grad_weight = backend_module(options.backend).gradients(
                problem,
                labels,
                tuple(rows),
                kept,
                (grad_log_probs, grad_entropy),
                need_hidden=need_hidden,
                need_weight=need_weight,
                reduce_hidden=lambda value: start_all_reduce(value, group),
                workspace_bytes=options.workspace_bytes,
                weight_total=None if main_grad is None else main_grad.open(),
            )
            if main_grad is not None:
                grad_weight = main_grad.close(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _refuse_bad_labels(labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if bool(bad.any()):
        position = int(bad.nonzero()[0, 0])
        raise CallArgumentError(
            f"label {int(labels[position])} at token {position} is outside the vocabulary of {vocabulary}.",
            f"pass ids below {vocabulary}, or ignore_index ({ignore_index}) for tokens that do not count.",
        )
