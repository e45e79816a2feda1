"""What the fused head may stand in for: a layer that computes ``hidden @ weight.T`` and nothing else.

Everything is checked when a model is patched, before the first step: a head that does more than the product
would otherwise lose that part without a word (LoRA on the head, bias, quantised weight, soft-capped logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mcore_fused.errors import (
    UnsupportedConfigError,
    UnsupportedModelError,
    UnsupportedOutputLayerError,
    qualified_name,
)
from mcore_fused.head.fsdp import is_shard, is_sharding_hook, owned_by_unit
from mcore_fused.head.layer_call import StandIn, weight_of
from mcore_fused.model.instance_attribute import own_attribute

__all__ = ["check_head", "check_weight", "head_of"]

_STOCK_LAYER = "megatron.core.tensor_parallel.layers.ColumnParallelLinear"
# Upstream's own subclass (its dev branch, August 2026): the stock product, unless it is called for the loss, which
# happens only under the configuration that is refused here. Checks of the suite hold it against stock logits.
_STOCK_UNLESS_ASKED = "megatron.core.transformer.linear_cross_entropy.LinearCrossEntropyModule"
_LOSS = "compute_language_model_loss"
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Config fields that change logits after the product, in Megatron or in the frameworks' forks of it.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_softcap", "logits_soft_cap", "logit_scale", "logits_scaling")


def head_of(model: nn.Module) -> nn.Module | None:
    """The output layer of a stage that owns a head; None on the other pipeline stages.

    Raises:
        UnsupportedOutputLayerError: the stage should have an output layer and has none under that name.
    """
    if not model.post_process:
        return None
    layer = getattr(model, "output_layer", None)
    if not isinstance(layer, nn.Module):
        raise UnsupportedOutputLayerError(
            f"{qualified_name(model)} is a last pipeline stage without an `output_layer` module.",
            "this megatron-core keeps its head elsewhere; run unfused, and report the class.",
        )
    return layer


def check_head(model: nn.Module, wrappers: Sequence[nn.Module] = ()) -> nn.Module | None:
    """Check that the head of ``model`` is one the fused path equals, and return it (None without a head).

    Args:
        model: the language model.
        wrappers: the modules around it; one of them may be the FSDP unit that gathers the head's weight.

    Raises:
        UnsupportedOutputLayerError: class, bias, adapter, hook or weight of the layer is not the stock kind.
        UnsupportedConfigError: the configuration transforms logits outside the layer.
    """
    layer = head_of(model)
    if layer is None:
        return None
    _check_layer(layer)
    if layer.weight is not None:
        _check_own_weight(weight_of(layer), (layer, model, *wrappers))
    _check_loss(model)
    _check_config(model)
    return layer


def _check_layer(layer: nn.Module) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    def refuse(what: str, lost: str) -> UnsupportedOutputLayerError:
        return UnsupportedOutputLayerError(
            f"output layer {qualified_name(layer)}: {what}; the fused head would lose {lost}.",
            f"run this model unfused, or give it a plain {_STOCK_LAYER}.",
        )

    if not isinstance(layer, ColumnParallelLinear) or not _is_stock_product(type(layer), ColumnParallelLinear):
        raise refuse("it has a forward of its own", "whatever that forward adds to the product")
    own_forward = own_attribute(layer, "forward")
    if own_forward is not None and not isinstance(own_forward, StandIn):
        raise refuse(f"its forward is replaced by {qualified_name(own_forward)}", "what the replacement does")
    if getattr(layer, "bias", None) is not None:
        raise refuse("it has a bias", "the bias")
    if next(layer.children(), None) is not None:
        names = ", ".join(f"{name} ({type(child).__name__})" for name, child in layer.named_children())
        raise refuse(f"it has submodules: {names}", "what they add (an adapter on the head gets no gradient)")
    extra = sorted(name for name, value in layer.named_parameters(recurse=False) if name not in {"weight", "bias"})
    if extra:
        raise refuse(f"it has further parameters: {', '.join(extra)}", "their part of the product")
    hooks = layer._forward_hooks.values()  # noqa: SLF001 - torch has no public way to ask
    if not all(map(is_sharding_hook, hooks)):
        raise refuse("it has forward hooks, which expect logits", "what the hooks do")
    if isinstance(getattr(type(layer), "weight", None), property):
        raise refuse("its weight is a property", "what the property computes")


def _is_stock_product(kind: type[nn.Module], stock: type[nn.Module]) -> bool:
    """Whether calls of this class do what calls of the stock class do, by the class that its forward comes from."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner is stock or f"{owner.__module__}.{owner.__qualname__}" == _STOCK_UNLESS_ASKED


def _check_loss(model: nn.Module) -> None:
    """The loss method is replaced with the head, so it must be Megatron's own, which does nothing to the logits."""
    own = own_attribute(model, _LOSS)
    name = qualified_name(own if own is not None else getattr(type(model), _LOSS))
    if not name.startswith(("megatron.core.", "mcore_fused.")):
        raise UnsupportedModelError(
            f"{_LOSS} of this {qualified_name(model)} is {name}; the fused head would lose what it does.",
            "run this model unfused, or transform the logits nowhere but in the output layer's weight.",
        )


def _check_own_weight(weight: torch.Tensor, around: Sequence[nn.Module]) -> None:
    """A shard is fine where a unit is seen that gathers it for the layer's call; there it is checked again."""
    if not is_shard(weight):
        check_weight(weight)
    elif not owned_by_unit(weight, around):
        raise UnsupportedOutputLayerError(
            f"the head's weight is a {qualified_name(weight)}, and none of the modules handed over is an FSDP unit "
            "that gathers it for a call of the head.",
            "hand over the outermost module, the one given to fully_shard; shard the head in no other way.",
        )


def check_weight(weight: torch.Tensor) -> None:
    """Refuse a weight that is not a plain floating tensor (quantised, sharded, fake).

    Raises:
        UnsupportedOutputLayerError: naming the weight's class and dtype.
    """
    if type(weight) not in {nn.Parameter, torch.Tensor} or weight.dtype not in _FLOATING:
        raise UnsupportedOutputLayerError(
            f"the head's weight is a {qualified_name(weight)} of dtype {weight.dtype}, not a plain floating tensor.",
            "keep the output layer out of quantisation, or run unfused.",
        )


def _check_config(model: nn.Module) -> None:
    config: Any = model.config
    if getattr(config, "cross_entropy_loss_fusion", False) and config.cross_entropy_fusion_impl == "linear":
        raise UnsupportedConfigError(
            f"config.cross_entropy_fusion_impl = 'linear' lets {qualified_name(model)} ask its output layer for the "
            "loss in place of logits.",
            "set cross_entropy_loss_fusion=False: the fused head takes its place, and MTP's losses are fused too.",
        )
    for name in _LOGIT_TRANSFORMS:
        value = getattr(config, name, None)
        if value not in (None, 0, 0.0, 1.0, False):
            raise UnsupportedConfigError(
                f"config.{name} = {value!r} transforms the logits outside the output layer of {qualified_name(model)}.",
                "run this model unfused; the fused head knows only MuP's output multiplier.",
            )
