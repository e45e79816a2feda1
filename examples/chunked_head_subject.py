"""A subject for a framework that only uses Megatron's hook, with a chunked head of its own (docs/add-a-subject.md).

Judge it with ``nox -s compat -- --subject examples/chunked_head_subject.py:ChunkedHead``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

ROWS = 16


@dataclass
class ChunkedOutput:
    """Log-probs and entropy, ``[batch, seq]`` in fp32, or in float64 for a float64 model."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


class ChunkedHead:
    """Logits of a few positions at a time; the backward pass computes them again. One rank, one temperature."""

    name = "chunked-head"
    capabilities = frozenset({"call", "float64"})
    since = "0.18"

    def patch(self, model: Any, mode: str = "auto") -> None:
        """Nothing to install: the hook is an argument of the call."""

    def unpatch(self, model: Any) -> None:
        """Nothing to remove."""

    def mode(self, model: Any) -> str:  # noqa: ARG002
        """Only the hook."""
        return "hook"

    def call(self, model: Any, *inputs: Any, labels: Any, temperature: Any = 1.0, **kwargs: Any) -> Any:
        """One call of the model; without labels, its logits."""
        if labels is None:
            return model(*inputs, **kwargs)
        hook = {"output_processor": _chunked, "output_processor_context": temperature}
        return model(*inputs, labels=labels, **hook, **kwargs)

    def evidence(self) -> dict[str, int]:
        """Nothing is counted."""
        return dict.fromkeys(("hook_calls", "deferred_head_calls", "kernel_launches", "unfused_fallbacks"), 0)


def _chunked(**hook: Any) -> ChunkedOutput:
    """The output processor: hidden states are ``[seq, batch, hidden]``, labels ``[batch, seq]``."""
    layer, weight, labels = hook["output_layer"], hook["output_weight"], hook["labels"].transpose(0, 1)

    def head(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = hook["scale_logits"](layer(hidden, weight=weight)[0])
        logits = (logits if logits.dtype is torch.float64 else logits.float()) / hook["context"]
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(-1, targets[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)

    chunks = zip(hook["hidden_states"].split(ROWS), labels.split(ROWS), strict=True)
    parts = [checkpoint(head, hidden, targets, use_reentrant=False) for hidden, targets in chunks]
    log_probs, entropy = (torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True))
    return ChunkedOutput(log_probs, entropy)
