"""Megatron's config logger: a fused forward logs what stock logs, with the fused outputs instead of logits.

Stock saves ``input_and_logits.rank_*.iter*.pth`` with the key ``logits``; in a fused call that key holds
``{"log_probs", "entropy"}``. In legacy mode upstream's own code saves the file, and the deferred handle pickles as
that dictionary; in hook mode the hook returns before upstream's logging, so this module saves it.
Source: ``megatron/core/config_logger.py`` and the end of ``GPTModel._postprocess``, 0.12 to 0.19.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from mcore_fused.outputs import FusedForwardOutput

__all__ = ["fused_payload", "log_hook_payload"]

_LOGGED_INPUTS = ("input_ids", "position_ids", "attention_mask", "decoder_input")


def fused_payload(output: FusedForwardOutput | torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is saved instead of logits: detached ``log_probs`` and ``entropy``, ``[batch, seq]`` each."""
    log_probs, entropy = (
        (output.log_probs, output.entropy) if isinstance(output, FusedForwardOutput) else output.unbind(0)
    )
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach()}


def log_hook_payload(hook: Mapping[str, Any], output: FusedForwardOutput | torch.Tensor) -> None:
    """Save inputs and fused outputs if the model's config asks for it."""
    config = hook.get("config")
    if not getattr(config, "config_logger_dir", ""):
        return
    from megatron.core.config_logger import log_config_to_disk

    payload = OrderedDict((name, hook.get(name)) for name in _LOGGED_INPUTS)
    payload["logits"] = fused_payload(output)
    log_config_to_disk(config, payload, prefix="input_and_logits")
