"""Counters of what ran. Every fused call increments them, so that fusion can be verified and not only requested.

Counters are kept outside the model, keyed weakly by its output layer. They appear neither in ``vars(model)`` nor in a
pickle or a deep copy, and they do not keep a model alive.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, replace

from torch import nn

__all__ = ["FusedForwardEvidence"]


@dataclass(frozen=True)
class FusedForwardEvidence:
    """What has run so far, on one model or in this process.

    Attributes:
        hook_calls: fused calls through Megatron's own ``output_processor`` hook.
        deferred_head_calls: fused calls through the deferred head (legacy mode).
        kernel_launches: runs of the fused linear cross entropy, including MTP losses.
        unfused_fallbacks: calls that requested fusion without labels and returned stock logits.
        unknown_keywords: keywords of the hook that this version of the library does not know.
    """

    hook_calls: int = 0
    deferred_head_calls: int = 0
    kernel_launches: int = 0
    unfused_fallbacks: int = 0
    unknown_keywords: frozenset[str] = field(default_factory=frozenset)


_lock = threading.Lock()
_by_layer: weakref.WeakKeyDictionary[nn.Module, FusedForwardEvidence] = weakref.WeakKeyDictionary()
_process = FusedForwardEvidence()


def _add(evidence: FusedForwardEvidence, counts: dict[str, int], keywords: frozenset[str]) -> FusedForwardEvidence:
    sums = {name: getattr(evidence, name) + count for name, count in counts.items()}
    return replace(evidence, **sums, unknown_keywords=evidence.unknown_keywords | keywords)


def record(layer: nn.Module, *, unknown_keywords: frozenset[str] = frozenset(), **counts: int) -> None:
    """Add counts to the evidence of the model that owns ``layer``, and to that of the process."""
    global _process  # noqa: PLW0603 - one process-wide counter is what this module is for
    with _lock:
        _by_layer[layer] = _add(_by_layer.get(layer, FusedForwardEvidence()), counts, unknown_keywords)
        _process = _add(_process, counts, unknown_keywords)


def evidence_for(layer: nn.Module | None) -> FusedForwardEvidence:
    """Return the evidence of the model that owns ``layer``; all zero for a stage without a head."""
    if layer is None:
        return FusedForwardEvidence()
    with _lock:
        return _by_layer.get(layer, FusedForwardEvidence())


def process_evidence() -> FusedForwardEvidence:
    """Return the evidence of all models of this process, including those that no longer exist."""
    with _lock:
        return _process
