"""Counters that prove what ran. Every fused call leaves evidence; a promise without evidence is no proof.

Counters live outside the model, keyed weakly by its output layer, so that nothing of ours is found in
``vars(model)``, in a pickle, or in a deep copy.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, replace

from torch import nn

__all__ = ["FusedForwardEvidence"]


@dataclass(frozen=True)
class FusedForwardEvidence:
    """What has run on one model (or, summed, in this process) so far.

    Attributes:
        hook_calls: fused calls that arrived through Megatron's own ``output_processor`` hook.
        deferred_head_calls: fused calls that arrived through the deferred head (legacy mode).
        kernel_launches: runs of the fused linear-cross-entropy, MTP losses included.
        unfused_fallbacks: calls that asked for fusion and got stock logits because there were no labels.
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
    """Add counts to the evidence of the model that owns ``layer`` and of the process."""
    global _process  # noqa: PLW0603 - one process-wide counter is what this module is for
    with _lock:
        _by_layer[layer] = _add(_by_layer.get(layer, FusedForwardEvidence()), counts, unknown_keywords)
        _process = _add(_process, counts, unknown_keywords)


def of_layer(layer: nn.Module | None) -> FusedForwardEvidence:
    """Evidence of the model that owns ``layer``; all zero for a stage without a head."""
    if layer is None:
        return FusedForwardEvidence()
    with _lock:
        return _by_layer.get(layer, FusedForwardEvidence())


def of_process() -> FusedForwardEvidence:
    """Evidence of all models of this process, also of those that are gone."""
    with _lock:
        return _process
