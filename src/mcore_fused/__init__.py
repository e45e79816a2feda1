"""Fused per-token log-probs and entropy for Megatron's models, without the ``[tokens, vocab]`` logits.

One code path in two installations: through the ``output_processor`` hook where a megatron-core has it, and
through the deferred head everywhere else. See :func:`patch_fused_forward` and :func:`call_fused_forward`.
"""

from mcore_fused.errors import MCoreFusedError
from mcore_fused.evidence import FusedForwardEvidence
from mcore_fused.hook import fused_output_processor
from mcore_fused.kernel import linear_cross_entropy
from mcore_fused.outputs import FusedForwardOutput, FusedOutputProcessorContext
from mcore_fused.patch import (
    call_fused_forward,
    fused_forward,
    fused_forward_evidence,
    fused_forward_mode,
    patch_fused_forward,
    unpatch_fused_forward,
)
from mcore_fused.unwrap import register_wrapper, unwrap_model

__all__ = [
    "FusedForwardEvidence",
    "FusedForwardOutput",
    "FusedOutputProcessorContext",
    "MCoreFusedError",
    "call_fused_forward",
    "fused_forward",
    "fused_forward_evidence",
    "fused_forward_mode",
    "fused_output_processor",
    "linear_cross_entropy",
    "patch_fused_forward",
    "register_wrapper",
    "unpatch_fused_forward",
    "unwrap_model",
]
