"""Fused per-token log-probs and entropy for Megatron-Core models, without the ``[tokens, vocab]`` logits.

The same computation runs in two modes: through Megatron's ``output_processor`` hook on releases that have it, and
through a deferred output layer everywhere else. Start with :func:`patch_fused_forward` and
:func:`call_fused_forward`.
"""

from mcore_fused.errors import (
    CallArgumentError,
    CallTypeError,
    DeferredLogitsError,
    ForeignPatchError,
    FusionDidNotRunError,
    MCoreFusedError,
    McoreFusedError,
    ModeError,
    PackingError,
    PatchOrderError,
    RegistryError,
    UnsupportedConfigError,
    UnsupportedModelError,
    UnsupportedOutputLayerError,
    UnusableHookWarning,
)
from mcore_fused.evidence import FusedForwardEvidence
from mcore_fused.frameworks.forward import (
    forward_model_gen,
    forward_no_padding_gen,
    fused_forward_model_engine,
    fused_forward_model_gen,
    fused_forward_no_padding_gen,
)
from mcore_fused.frameworks.registry import (
    get_mcore_forward_fused_fn,
    get_mcore_forward_fused_model_engine_fn,
    register_architecture,
)
from mcore_fused.kernel import (
    KernelLaunches,
    PolicyLoss,
    PolicyLossOutput,
    fused_linear_policy_loss,
    kernel_launches,
    linear_cross_entropy,
)
from mcore_fused.model.unwrap import register_wrapper, unwrap_model
from mcore_fused.modes.hook import fused_output_processor
from mcore_fused.outputs import FusedForwardOutput, FusedOutputProcessorContext
from mcore_fused.packing import (
    PackingLayout,
    PackingSettings,
    packed_seq_params,
    postprocess_packed_seqs,
    postprocess_packed_seqs_for_dict_output,
    postprocess_thd_engine,
    preprocess_packed_seqs,
    preprocess_thd_engine,
)
from mcore_fused.patch import (
    call_fused_forward,
    fused_forward,
    fused_forward_evidence,
    fused_forward_mode,
    patch_fused_forward,
    unpatch_fused_forward,
)
from mcore_fused.schedule_plan import build_fused_schedule_plan

__all__ = [
    "CallArgumentError",
    "CallTypeError",
    "DeferredLogitsError",
    "ForeignPatchError",
    "FusedForwardEvidence",
    "FusedForwardOutput",
    "FusedOutputProcessorContext",
    "FusionDidNotRunError",
    "KernelLaunches",
    "MCoreFusedError",
    "McoreFusedError",
    "ModeError",
    "PackingError",
    "PackingLayout",
    "PackingSettings",
    "PatchOrderError",
    "PolicyLoss",
    "PolicyLossOutput",
    "RegistryError",
    "UnsupportedConfigError",
    "UnsupportedModelError",
    "UnsupportedOutputLayerError",
    "UnusableHookWarning",
    "build_fused_schedule_plan",
    "call_fused_forward",
    "forward_model_gen",
    "forward_no_padding_gen",
    "fused_forward",
    "fused_forward_evidence",
    "fused_forward_mode",
    "fused_forward_model_engine",
    "fused_forward_model_gen",
    "fused_forward_no_padding_gen",
    "fused_linear_policy_loss",
    "fused_output_processor",
    "get_mcore_forward_fused_fn",
    "get_mcore_forward_fused_model_engine_fn",
    "kernel_launches",
    "linear_cross_entropy",
    "packed_seq_params",
    "patch_fused_forward",
    "postprocess_packed_seqs",
    "postprocess_packed_seqs_for_dict_output",
    "postprocess_thd_engine",
    "preprocess_packed_seqs",
    "preprocess_thd_engine",
    "register_architecture",
    "register_wrapper",
    "unpatch_fused_forward",
    "unwrap_model",
]
