"""Weights under parameter sharding: torch's ``fully_shard`` (FSDP2) and Megatron-FSDP.

Between calls such a weight is a DTensor, of which this rank holds a part. Inside a call of its unit's module it is a
plain tensor. Both kinds of sharding are recognised by marks on modules and parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mcore_fused.errors import UnsupportedOutputLayerError, qualified_name

__all__ = ["check_gathered", "free_gathered", "is_shard", "is_sharding_hook", "owned_by_unit"]

# Modules whose forward hooks gather and free weights, and leave what a layer computes as it is.
_HOOK_MODULES = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.fsdp.",
    "megatron.core.distributed.custom_fsdp.",
    "megatron.core.distributed.fsdp.",
    "megatron_fsdp.",
)
# What Megatron-FSDP (0.14) and Megatron's wrapper of FSDP2 (0.16) write on the parameters that they shard.
_MEGATRON_FSDP_MARK = "__fsdp_param__"
_MARKS = (_MEGATRON_FSDP_MARK, "is_torch_fsdp2_param")


def is_sharding_hook(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook belongs to parameter sharding."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_HOOK_MODULES)


def is_shard(weight: torch.Tensor) -> bool:
    """Whether this rank holds only a part of ``weight``."""
    return any(kind.__name__ == "DTensor" for kind in type(weight).__mro__)


def is_megatron_fsdp_weight(weight: torch.Tensor) -> bool:
    """Whether Megatron-FSDP manages this parameter, sharded or gathered."""
    return bool(getattr(weight, _MEGATRON_FSDP_MARK, False))


def owned_by_unit(weight: torch.Tensor, around: Iterable[nn.Module]) -> bool:
    """Whether the weight, or one of the modules around it, is marked by sharding that gathers weights in hooks."""
    return any(getattr(weight, mark, False) for mark in _MARKS) or any(map(_is_unit, around))


def _is_unit(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.distributed.")
        for kind in type(module).__mro__
    )


def check_gathered(weight: torch.Tensor, *, shared: bool) -> None:
    """Refuse a weight that is a shard inside the output layer's call.

    Args:
        weight: the weight of the product.
        shared: whether the model handed it over, because it is the embedding's.

    Raises:
        UnsupportedOutputLayerError: it was not gathered.
    """
    if not is_shard(weight):
        return
    if shared:
        raise UnsupportedOutputLayerError(
            f"the head shares its weight with the embedding, and inside the head's call it is a "
            f"{qualified_name(weight)}: the embedding's FSDP unit has freed it after the embedding's own call "
            "(the unfused head fails on it too).",
            "give the embedding's unit reshard_after_forward=False, leave the embedding to the root's unit, or untie.",
        )
    raise UnsupportedOutputLayerError(
        f"inside the output layer's call its weight is a {qualified_name(weight)}: no FSDP unit gathered it.",
        "call the outermost module that was given to fully_shard, and shard the head in no other way.",
    )


def free_gathered(layer: nn.Module) -> None:
    """After a failed call, reshard a layer that is an FSDP2 unit of its own."""
    reshard = getattr(layer, "reshard", None)
    if _is_unit(layer) and callable(reshard):
        reshard()
