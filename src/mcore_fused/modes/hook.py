"""``fused_output_processor``: the callback for Megatron's own hook (megatron-core 0.18 and later, PR #4686).

The hook hands over the hidden states before the sequence-parallel gather, the output layer and MuP's scaling.
The processor calls the layer with its product deferred, lets the model scale the handle, and ends in the same
:func:`mcore_fused.head.fused.fused_head` as legacy mode.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_fused import evidence
from mcore_fused.errors import ModeError, UnsupportedConfigError, qualified_name
from mcore_fused.head.config_logger import log_hook_payload
from mcore_fused.head.deferred import DeferredLogits, deferred_output_layer
from mcore_fused.head.fused import fused_head
from mcore_fused.head.product import check_product
from mcore_fused.head.supported import check_fused_call
from mcore_fused.outputs import FusedCall, FusedForwardOutput

__all__ = ["HOOK_KEYWORDS", "HOOK_PARAMETERS", "REQUIRED_KEYWORDS", "fused_output_processor"]

# The parameters by which a forward declares the hook.
HOOK_PARAMETERS = ("output_processor", "output_processor_context")
# What 0.18.0 to 0.19.2 hand over, all by keyword; this processor needs the first seven.
HOOK_KEYWORDS = (
    "hidden_states", "output_layer", "output_weight", "labels", "scale_logits", "context", "runtime_gather_output",
    "loss_mask", "input_ids", "position_ids", "attention_mask", "decoder_input", "inference_context",
    "packed_seq_params", "compute_language_model_loss", "config",
)  # fmt: skip
REQUIRED_KEYWORDS = frozenset(HOOK_KEYWORDS[:7])


def fused_output_processor(**hook: Any) -> FusedForwardOutput | torch.Tensor:
    """Turn the hook's hidden states into per-token log-probs and entropy.

    Pass it as ``output_processor=`` with a :class:`FusedOutputProcessorContext` as ``output_processor_context=``
    (None means the default settings). Unknown keywords are accepted and recorded in the evidence, so that a new
    keyword of upstream neither ends a training run nor goes unnoticed.

    Returns:
        :class:`FusedForwardOutput`; without labels the stock logits ``[batch, seq, vocab shard]``.

    Raises:
        ModeError: the hook no longer hands over a keyword that the fused head needs.
        CallTypeError: the context has another type.
        UnsupportedModelError: (also its subclasses for output layer and config) the fused head would lose something.
        UnsupportedConfigError: an inference context is active.
    """
    missing = sorted(REQUIRED_KEYWORDS - hook.keys())
    if missing:
        raise ModeError(
            f"the output_processor hook of this megatron-core no longer hands over {', '.join(missing)}.",
            'use patch_fused_forward(model, mode="legacy"), and report the release.',
        )
    call = FusedCall.from_context(hook["context"])
    layer = hook["output_layer"]
    unknown = frozenset(name for name in hook if name not in HOOK_KEYWORDS)
    if hook.get("inference_context") is not None:
        raise UnsupportedConfigError(
            "fused log-probs were requested together with an inference context.",
            "drop output_processor during generation; call the fused forward for training and log-prob passes.",
        )
    arguments = {"weight": hook["output_weight"], "runtime_gather_output": hook["runtime_gather_output"]}
    if hook["labels"] is None:
        evidence.record(layer, unfused_fallbacks=1, unknown_keywords=unknown)
        logits, _ = layer(hook["hidden_states"], **arguments)
        stock: torch.Tensor = hook["scale_logits"](logits).transpose(0, 1).contiguous()
        return stock
    check_fused_call(layer, hook.get("config"), hook.get("compute_language_model_loss"))
    check_product(layer, hook["hidden_states"])
    with deferred_output_layer(layer):
        deferred, _ = layer(hook["hidden_states"], **arguments)
    deferred = hook["scale_logits"](deferred)
    if not isinstance(deferred, DeferredLogits):
        raise ModeError(
            f"scale_logits returned a {qualified_name(deferred)} for deferred logits.",
            "this megatron-core scales its logits in a new way; run unfused, and report the release.",
        )
    _check_same_labels(hook["labels"], call.labels)
    output = fused_head(deferred, hook["labels"], call.settings)
    evidence.record(layer, hook_calls=1, unknown_keywords=unknown)
    call.receipts.append("hook")
    log_hook_payload(hook, output)
    return output


def _check_same_labels(labels: Any, callers: torch.Tensor | None) -> None:
    """Check that the hook's labels are the caller's; compares values on the host only if the objects differ."""
    if callers is None or labels is callers or not isinstance(labels, torch.Tensor):
        return
    if labels.shape != callers.shape or not bool((labels == callers.to(labels.device)).all()):
        raise ModeError(
            f"the output_processor hook handed over labels {tuple(labels.shape)} that are not the caller's "
            f"{tuple(callers.shape)}.",
            'use patch_fused_forward(model, mode="legacy"), and report the release.',
        )
