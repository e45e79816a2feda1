"""What a fused forward takes and returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree

from mcore_fused.errors import CallArgumentError, CallTypeError

__all__ = ["FusedForwardOutput", "FusedOutputProcessorContext"]


@dataclass
class FusedForwardOutput:
    """Result of a fused forward on the stage that owns the head.

    A dataclass, not a named tuple: Megatron's ``Float16Module`` rebuilds tuples and lists and would lose the
    field names (megatron-core 0.12 to 0.19, ``transformer/module.py``); everything else passes through as it
    is, therefore both outputs are already fp32 here.

    Attributes:
        log_probs: ``[batch, seq]``, fp32 (float64 in a float64 model): log-probability of each label under
            ``softmax(scale * logits / temperature)``; 0 where the label is the ignore index.
        entropy: ``[batch, seq]``, same dtype: entropy of that distribution in nats; 0 where ignored.
        hidden_states: ``[seq, batch, hidden]`` after the final norm (sharded along seq under sequence
            parallelism), only when the context asked for it.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    hidden_states: torch.Tensor | None = None


# FSDP2 looks for the tensors of its root's output by torch's own walk; one that it does not find gets no
# pre-backward hook, and a root that has freed its weights after the forward would not gather them again.
_pytree.register_pytree_node(
    FusedForwardOutput,
    lambda output: ([output.log_probs, output.entropy, output.hidden_states], None),
    lambda tensors, _: FusedForwardOutput(*tensors),
)


@dataclass(frozen=True)
class FusedOutputProcessorContext:
    """Per-call settings of the fused head; one object per micro-batch, never shared between them.

    Attributes:
        temperature: finite float above 0, or a tensor ``[batch, seq]`` packed exactly as the labels are.
        ignore_index: label whose log-prob, entropy and gradient are exactly 0.
        vocab_size: real vocabulary size when the head is padded; the padded columns are left out. ``None``
            counts every column, as stock Megatron does.
        logits_budget_bytes: memory the kernel may keep from forward to save recomputation in backward.
        backend: ``auto``, ``triton`` or ``torch``; see :func:`mcore_fused.linear_cross_entropy`.
        return_hidden_states: keep the hidden states in the output (keeps that activation alive).
        single_tensor: return one tensor ``[2, batch, seq]`` (log-probs, entropy) instead of the dataclass;
            the 1F1B schedule plan can carry nothing else between its nodes.
        runs: receipts: the head appends its installation ("hook" or "legacy") each time it has run with this
            context, so that a caller can prove that it did.
        labels: the caller's own labels, where every wrapper hands them on unchanged; the head compares what the
            model hands over with them.

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
    runs: list[str] = field(default_factory=list, compare=False, repr=False)
    labels: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_temperature(self.temperature)


class CarriedContext:
    """A context on its way through wrappers that rebuild dataclasses and round the tensors inside (FSDP2's casts)."""

    def __init__(self, context: FusedOutputProcessorContext) -> None:
        self.context = context


def check_temperature(temperature: object) -> None:
    """Refuse what is not a temperature; values inside a tensor are checked by the kernel, on its device."""
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
