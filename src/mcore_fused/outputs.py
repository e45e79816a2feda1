"""What a fused forward takes and returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils import _pytree

from mcore_fused.errors import CallArgumentError, CallTypeError, qualified_name

__all__ = ["FusedForwardOutput", "FusedOutputProcessorContext"]


@dataclass
class FusedForwardOutput:
    """Result of a fused forward on the pipeline stage that owns the head.

    This is a dataclass and not a named tuple because Megatron's ``Float16Module`` rebuilds tuples and lists and
    would lose the field names (``transformer/module.py``, megatron-core 0.12 to 0.19). It passes other objects
    through unchanged, so both outputs are already at least fp32.

    Attributes:
        log_probs: ``[batch, seq]``, fp32 (float64 in a float64 model): log-probability of each label under
            ``softmax(scale * logits / temperature)``; 0 at ignored labels.
        entropy: ``[batch, seq]``, same dtype: entropy of that distribution in nats; 0 at ignored labels.
        hidden_states: ``[seq, batch, hidden]`` after the final norm (sharded along seq under sequence
            parallelism), only if the context asked for it.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    hidden_states: torch.Tensor | None = None


# FSDP2 finds the tensors in its root's output by torch's pytree. A tensor that it does not find gets no pre-backward
# hook, and a root that has freed its weights after the forward would not gather them again.
_pytree.register_pytree_node(
    FusedForwardOutput,
    lambda output: ([output.log_probs, output.entropy, output.hidden_states], None),
    lambda tensors, _: FusedForwardOutput(*tensors),
)


@dataclass(frozen=True)
class FusedOutputProcessorContext:
    """Settings of a fused call.

    Attributes:
        temperature: finite float above 0, or a tensor ``[batch, seq]`` packed in the same way as the labels.
        ignore_index: label whose log-prob, entropy and gradient are exactly 0.
        vocab_size: real vocabulary size if the head is padded; padded columns are excluded. ``None`` includes
            every column, as stock Megatron does.
        logits_budget_bytes: memory that the kernel may keep from forward to backward to avoid recomputation.
        backend: ``auto``, ``triton`` or ``torch``; see :func:`mcore_fused.linear_cross_entropy`.
        return_hidden_states: keep the hidden states in the output (keeps that activation alive).
        single_tensor: return one tensor ``[2, batch, seq]`` (log-probs, entropy) instead of the dataclass;
            the 1F1B schedule plan passes only single tensors between its nodes.
        counted_rows: number of labels on this rank that are not ``ignore_index``, or an upper bound of it; only that
            many rows are projected. See :func:`mcore_fused.linear_cross_entropy`.

    Raises:
        CallArgumentError: temperature is not finite, or not above 0.
        CallTypeError: temperature is neither a number nor a floating tensor.
    """

    temperature: float | torch.Tensor = 1.0
    ignore_index: int = -100
    vocab_size: int | None = None
    logits_budget_bytes: int = 0
    backend: str = "auto"
    return_hidden_states: bool = False
    single_tensor: bool = False
    counted_rows: int | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)


class FusedCall:
    """One fused call on its way through the model. Internal; callers pass :class:`FusedOutputProcessorContext`.

    This is a plain class because FSDP2 rebuilds dataclasses among a model's inputs and casts the tensors in them.

    Attributes:
        settings: settings of the call.
        labels: the caller's labels if every wrapper passes them on unchanged, else None; the head compares them
            with the labels that the model hands over.
        receipts: the head appends its mode ("hook" or "legacy") each time it has run for this call.
    """

    def __init__(self, settings: FusedOutputProcessorContext, labels: torch.Tensor | None = None) -> None:
        self.settings = settings
        self.labels = labels
        self.receipts: list[str] = []

    @classmethod
    def from_context(cls, context: object) -> FusedCall:
        """Return the call of an ``output_processor_context``; None means the default settings.

        Raises:
            CallTypeError: the context has another type.
        """
        if isinstance(context, FusedCall):
            return context
        if context is None:
            return cls(FusedOutputProcessorContext())
        if not isinstance(context, FusedOutputProcessorContext):
            raise CallTypeError(
                f"output_processor_context is a {qualified_name(context)}.",
                "pass a mcore_fused.FusedOutputProcessorContext.",
            )
        return cls(context)


def check_temperature(temperature: object) -> None:
    """Check the type and range of a temperature; the kernel checks the values of a tensor on its device.

    Raises:
        CallArgumentError: a number that is not finite, or not above 0.
        CallTypeError: neither a number nor a floating tensor.
    """
    if isinstance(temperature, torch.Tensor):
        if not temperature.is_floating_point():
            raise CallTypeError(
                f"temperature tensor has dtype {temperature.dtype}.", "pass a floating tensor shaped like the labels."
            )
        return
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise CallTypeError(
            f"temperature is a {type(temperature).__name__}.",
            "pass a float above 0, or a tensor like the labels.",
        )
    if not math.isfinite(temperature) or temperature <= 0:
        raise CallArgumentError(
            f"temperature is {temperature}.",
            "pass a finite value above 0; for greedy rollouts compute training log-probs at temperature 1.",
        )
