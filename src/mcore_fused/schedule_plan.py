"""Fused outputs from the 1F1B schedule plan (expert-parallel overlap).

``GPTModel.build_schedule_plan`` (megatron-core 0.14 and later) cuts a forward into nodes that run later, interleaved
with another micro-batch's backward. The last node calls ``_postprocess`` and keeps one tensor: ``ScheduleNode`` reads
``requires_grad`` of a single result, so a dataclass fails there. The fused outputs therefore form one tensor
``[2, batch, seq]``: log-probs, then entropy.

From 0.18 on the plan carries the hook's processor itself. Before, and in forced legacy mode, the head is deferred
while that one node runs. The plan belongs to one micro-batch, so nothing has to be removed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mcore_fused.errors import FusionDidNotRunError, ModeError, UnsupportedConfigError, qualified_name
from mcore_fused.head.supported import get_head
from mcore_fused.model.instance import own_attribute
from mcore_fused.model.signature import forward_parameters
from mcore_fused.model.unwrap import unwrap_model
from mcore_fused.modes.deferral import run_with_deferred_head
from mcore_fused.modes.hook import HOOK_PARAMETERS, fused_output_processor
from mcore_fused.modes.legacy import LegacyForward
from mcore_fused.outputs import FusedCall, FusedOutputProcessorContext
from mcore_fused.patch import is_patched

__all__ = ["build_fused_schedule_plan"]


def build_fused_schedule_plan(
    model: nn.Module,
    *args: Any,
    temperature: float | torch.Tensor = 1.0,
    context: FusedOutputProcessorContext | None = None,
    **kwargs: Any,
) -> Any:
    """Build the schedule plan of one micro-batch whose post-process node returns fused outputs.

    Args:
        model: a patched model chunk.
        *args: as the model's own ``build_schedule_plan``.
        temperature: float above 0, or ``[batch, seq]`` packed as the labels.
        context: all settings instead of ``temperature``.
        **kwargs: as the model's own ``build_schedule_plan``; ``labels`` must be given by name.

    Returns:
        The plan. Its post-process node returns ``[2, batch, seq]`` fp32 (log-probs, entropy) on a stage with a
        head; plans of other stages, or without labels, are stock.

    Raises:
        ModeError: the model is not patched.
        UnsupportedConfigError: this model class or release has no schedule plan, or its node has changed.
    """
    inner = unwrap_model(model)
    if not is_patched(inner):
        raise ModeError("this model is not patched.", "call patch_fused_forward(model) first.")
    build = getattr(inner, "build_schedule_plan", None)
    if build is None:
        raise UnsupportedConfigError(
            f"{qualified_name(inner)} has no build_schedule_plan (GPTModel has it from megatron-core 0.14).",
            "switch overlap_moe_expert_parallel_comm off, or use a release and a model class that have it.",
        )
    layer = get_head(inner)
    labels = kwargs.get("labels")
    if layer is None or labels is None:
        return build(*args, **kwargs)
    settings = context or FusedOutputProcessorContext(temperature=temperature)
    call = FusedCall(replace(settings, single_tensor=True))
    if not isinstance(own_attribute(inner, "forward"), LegacyForward):
        if not all(name in forward_parameters(build) for name in HOOK_PARAMETERS):
            raise UnsupportedConfigError(
                f"{qualified_name(inner)} has the hook in forward, and not in build_schedule_plan.",
                'patch it with mode="legacy".',
            )
        return build(*args, **kwargs, output_processor=fused_output_processor, output_processor_context=call)
    plan = build(*args, **kwargs)
    node: Any = getattr(plan, "post_process", None)
    if not callable(getattr(node, "forward_func", None)):
        raise UnsupportedConfigError(
            f"{qualified_name(plan)} has no post-process node with a forward_func.",
            "this megatron-core builds its plan in a new way; run without the overlap, and report the release.",
        )
    node.forward_func = _FusedPostProcess(inner, layer, labels, call, node.forward_func)
    return plan


class _FusedPostProcess:
    """The post-process node's own function, run with the head deferred."""

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        labels: torch.Tensor,
        call: FusedCall,
        forward_func: Callable[..., Any],
    ) -> None:
        self.arguments = (model, layer, labels, call)
        self.forward_func = forward_func

    def __call__(self, *inputs: Any) -> Any:
        """Run the node.

        Raises:
            FusionDidNotRunError: the node did not ask the head for the loss of these labels exactly once.
        """
        result = run_with_deferred_head(*self.arguments, lambda: self.forward_func(*inputs))
        if not isinstance(result, torch.Tensor):
            raise FusionDidNotRunError(
                f"the post-process node returned a {qualified_name(result)}, not one tensor.",
                "this megatron-core post-processes its plan in a new way; run without the overlap, and report it.",
            )
        return result
