"""The one implementation of "hidden + head + labels -> (log-probs, entropy)".

Hook mode and legacy mode both end here, with the same :class:`DeferredLogits`, so they agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn

from mcore_fused import evidence
from mcore_fused.errors import CallArgumentError, CallTypeError, UnsupportedConfigError
from mcore_fused.head.deferred import DeferredLogits
from mcore_fused.head.fsdp import is_megatron_fsdp_weight
from mcore_fused.head.supported import check_weight
from mcore_fused.head.tensor_parallel import gather_sequence, reduce_gradient, tensor_parallel_group
from mcore_fused.kernel import linear_cross_entropy
from mcore_fused.outputs import FusedForwardOutput, FusedOutputProcessorContext

__all__ = ["fused_head", "fused_loss"]

_INTEGER = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def fused_head(
    logits: DeferredLogits, labels: torch.Tensor, context: FusedOutputProcessorContext
) -> FusedForwardOutput | torch.Tensor:
    """Compute per-token log-probs and entropy of the model's own labels.

    Args:
        logits: the deferred head; ``hidden`` is ``[seq, batch, hidden]`` (a shard of seq under sequence parallelism).
        labels: ``[batch, seq]`` integers, already shifted, the same on every tensor-parallel rank.
        context: settings of this call.

    Returns:
        :class:`FusedForwardOutput`, or ``[2, batch, seq]`` if the context asks for a single tensor.

    Raises:
        CallArgumentError: labels or temperature do not match the hidden states' rows.
        CallTypeError: labels are not integers.
    """
    temperature = context.temperature
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != labels.shape:
            raise CallArgumentError(
                f"temperature has shape {tuple(temperature.shape)}, the labels {tuple(labels.shape)}.",
                "pack, pad and shard a per-token temperature exactly as the labels.",
            )
        temperature = temperature.transpose(0, 1)
    log_probs, entropy = _run(logits, labels, temperature, context, context.counted_rows)
    if context.single_tensor:
        return torch.stack((log_probs, entropy))
    return FusedForwardOutput(log_probs, entropy, logits.hidden if context.return_hidden_states else None)


def fused_loss(logits: DeferredLogits, labels: torch.Tensor, context: FusedOutputProcessorContext) -> torch.Tensor:
    """Compute the per-token loss ``[batch, seq]`` of other labels (MTP's rolled ones), at temperature 1 as stock."""
    log_probs, _ = _run(logits, labels, 1.0, context)
    return -log_probs


def _run(
    logits: DeferredLogits,
    labels: torch.Tensor,
    temperature: float | torch.Tensor,
    context: FusedOutputProcessorContext,
    counted_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = logits.layer
    group = tensor_parallel_group(layer)

    def compute(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_weight(weight)
        if is_megatron_fsdp_weight(weight) and not context.single_tensor:
            raise UnsupportedConfigError(
                "Megatron-FSDP looks for tensors in what the model returns, and sees none in a FusedForwardOutput.",
                "call the model with call_fused_forward, or ask for FusedOutputProcessorContext(single_tensor=True).",
            )
        if group is not None and logits.sequence_parallel:
            hidden = gather_sequence(hidden, group)
        elif group is not None and not getattr(layer, "disable_grad_reduce", False):
            hidden = reduce_gradient(hidden, group)
        _check_labels(labels, hidden)
        # Megatron's hidden states are sequence first, its labels batch first. Flattening both as they are pairs
        # the wrong rows for every batch above 1, silently.
        return linear_cross_entropy(
            hidden,
            weight,
            labels.transpose(0, 1),
            temperature=temperature,
            tp_group=group,
            ignore_index=context.ignore_index,
            scale=logits.scale,
            vocab_size=context.vocab_size,
            vocab_shard=_vocab_shard(layer, weight, group),
            logits_budget_bytes=context.logits_budget_bytes,
            reduce_hidden_grad=False,  # done by the mapping above, or wanted partial by the layer
            backend=context.backend,
            counted_rows=counted_rows,
            gradient_accumulation_fusion=bool(getattr(layer, "gradient_accumulation_fusion", False)),
        )

    log_probs, entropy = logits.call_with_layer_hooks(compute)
    evidence.record(layer, kernel_launches=1)
    return log_probs.transpose(0, 1), entropy.transpose(0, 1)


def _vocab_shard(layer: nn.Module, weight: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, int] | None:
    """Return first row and total rows of an evenly split shard; None if the other ranks must be asked."""
    if group is None:
        return None
    rows, ranks = weight.shape[0], dist.get_world_size(group)
    return (dist.get_rank(group) * rows, ranks * rows) if getattr(layer, "output_size", None) == ranks * rows else None


def _check_labels(labels: object, hidden: torch.Tensor) -> None:
    if not isinstance(labels, torch.Tensor) or labels.dtype not in _INTEGER:
        kind = labels.dtype if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise CallTypeError(f"labels are {kind}.", "pass an integer tensor [batch, seq] of vocabulary indices.")
    expected = (hidden.shape[1], hidden.shape[0])
    if tuple(labels.shape) != expected:
        raise CallArgumentError(
            f"labels have shape {tuple(labels.shape)}, the hidden states have rows for [batch, seq] = {expected}.",
            "slice the labels wherever the hidden states are sliced (context parallelism, VLM token merging).",
        )
    if labels.device != hidden.device:
        raise CallArgumentError(
            f"labels are on {labels.device}, the hidden states on {hidden.device}.", "move the labels."
        )
