"""Which output layers the fused head can replace: those that compute ``hidden @ weight.T`` and nothing else.

A head that does more than the product (LoRA on the head, bias, quantised weight, soft-capped logits) would lose that
part silently. Everything is checked when a model is patched, and again in every fused call, because adapters, hooks
and options are often added later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from mcore_fused.head.layer_call import ForwardOverride, get_weight
from mcore_fused.head.product import check_product
from mcore_fused.model.instance import own_attribute

__all__ = ["check_fused_call", "check_head", "check_weight", "get_head"]

_STOCK_LAYER = "megatron.core.tensor_parallel.layers.ColumnParallelLinear"
# Upstream's own subclass (dev branch, August 2026). It computes the stock product unless it is called for the loss,
# which happens only under the configuration that is refused here. The suite compares it with stock logits.
_STOCK_UNLESS_ASKED = "megatron.core.transformer.linear_cross_entropy.LinearCrossEntropyModule"
_LOSS = "compute_language_model_loss"
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Config fields that change logits after the product, in Megatron or in the frameworks' forks of it.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_softcap", "logits_soft_cap", "logit_scale", "logits_scaling")


def get_head(model: nn.Module) -> nn.Module | None:
    """Return the output layer of a stage that owns the head; None on the other pipeline stages.

    Raises:
        UnsupportedOutputLayerError: a last stage has no module named ``output_layer``.
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
    """Check that the fused path equals the head of ``model``, and return the head (None without one).

    Args:
        model: the language model.
        wrappers: the modules around it; one of them may be the FSDP unit that gathers the head's weight.

    Raises:
        UnsupportedOutputLayerError: class, bias, adapter, hook, option or weight of the layer is not the stock kind.
        UnsupportedModelError: the loss method is not Megatron's own.
        UnsupportedConfigError: the configuration transforms logits outside the layer.
    """
    layer = get_head(model)
    if layer is None:
        return None
    _check_layer(layer)
    if layer.weight is not None:
        _check_own_weight(get_weight(layer), (layer, model, *wrappers))
    _check_loss(getattr(model, _LOSS))
    _check_config(model.config)
    check_product(layer, next(model.parameters()) if layer.weight is None else get_weight(layer))
    return layer


def check_fused_call(layer: nn.Module, config: object, loss: Callable[..., Any] | None) -> None:
    """Check the head again in a fused call; costs a few attribute reads and no device access.

    Args:
        layer: the output layer of this call.
        config: the model's configuration.
        loss: the model's loss method, or None if it is not known.

    Raises:
        UnsupportedOutputLayerError: as :func:`check_head`, as for all that follow.
        UnsupportedModelError: the loss method.
        UnsupportedConfigError: the configuration.
    """
    _check_layer(layer)
    if loss is not None:
        _check_loss(loss)
    _check_config(config)


def _check_layer(layer: nn.Module) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    def refuse(what: str, lost: str) -> UnsupportedOutputLayerError:
        return UnsupportedOutputLayerError(
            f"output layer {qualified_name(layer)}: {what}, and the fused head would lose {lost}.",
            f"run this model unfused, or give it a plain {_STOCK_LAYER}.",
        )

    if not isinstance(layer, ColumnParallelLinear) or not _is_stock_product(type(layer), ColumnParallelLinear):
        raise refuse("it has a forward of its own", "whatever that forward adds to the product")
    own_forward = own_attribute(layer, "forward")
    if own_forward is not None and not isinstance(own_forward, ForwardOverride):
        raise refuse(f"its forward is replaced by {qualified_name(own_forward)}", "what the replacement does")
    if getattr(layer, "bias", None) is not None:
        raise refuse("it has a bias", "the bias")
    if any(child is not None for child in layer._modules.values()):  # noqa: SLF001 - cheaper than children()
        names = ", ".join(f"{name} ({type(child).__name__})" for name, child in layer.named_children())
        raise refuse(f"it has submodules: {names}", "what they add (an adapter on the head gets no gradient)")
    parameters = layer._parameters.items()  # noqa: SLF001
    extra = [name for name, value in parameters if value is not None and name not in {"weight", "bias"}]
    if extra:
        raise refuse(f"it has further parameters: {', '.join(extra)}", "their part of the product")
    # Torch has no public way to list hooks.
    if not all(map(is_sharding_hook, layer._forward_hooks.values())):  # noqa: SLF001
        raise refuse("it has forward hooks, which expect logits", "what the hooks do")
    if not all(map(is_sharding_hook, layer._backward_hooks.values())):  # noqa: SLF001
        raise refuse("it has backward hooks, which expect the gradient of logits", "what the hooks do")
    if not all(map(is_sharding_hook, layer._backward_pre_hooks.values())):  # noqa: SLF001
        raise refuse("it has backward pre-hooks, which expect the gradient of logits", "what the hooks do")
    if isinstance(getattr(type(layer), "weight", None), property):
        raise refuse("its weight is a property", "what the property computes")


def _is_stock_product(kind: type[nn.Module], stock: type[nn.Module]) -> bool:
    """Whether the class inherits its forward from the stock class, or from a known subclass of it."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner is stock or f"{owner.__module__}.{owner.__qualname__}" == _STOCK_UNLESS_ASKED


def _check_loss(loss: Callable[..., Any]) -> None:
    """The fused head replaces the loss method too, so it must be Megatron's own, which leaves logits unchanged."""
    name = qualified_name(loss)
    if not name.startswith(("megatron.core.", "mcore_fused.")):
        raise UnsupportedModelError(
            f"the model's {_LOSS} is {name}, and the fused head would lose what it does.",
            "run this model unfused, or transform the logits in the output layer's weight only.",
        )


def _check_own_weight(weight: torch.Tensor, around: Sequence[nn.Module]) -> None:
    """Accept a shard if an FSDP unit gathers it for the layer's call; it is checked again inside that call."""
    if not is_shard(weight):
        check_weight(weight)
    elif not owned_by_unit(weight, around):
        raise UnsupportedOutputLayerError(
            f"the head's weight is a {qualified_name(weight)}, and no module of the chain is an FSDP unit that gathers "
            "it for a call of the head.",
            "pass the outermost module, the one given to fully_shard, and do not shard the head in another way.",
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


def _check_config(config: Any) -> None:
    if getattr(config, "cross_entropy_loss_fusion", False) and config.cross_entropy_fusion_impl == "linear":
        raise UnsupportedConfigError(
            "config.cross_entropy_fusion_impl = 'linear' makes the model ask its output layer for the loss instead of "
            "logits.",
            "set cross_entropy_loss_fusion=False: the fused head replaces it, including MTP's losses.",
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise UnsupportedConfigError(
            "config.defer_embedding_wgrad_compute collects the output layer's inputs and the gradients of its logits "
            "for a later product, and the fused head has no gradients of logits.",
            "set defer_embedding_wgrad_compute=False: the fused head adds its weight gradient to main_grad at once.",
        )
    for name in _LOGIT_TRANSFORMS:
        value = getattr(config, name, None)
        if value not in (None, 0, 0.0, 1.0, False):
            raise UnsupportedConfigError(
                f"config.{name} = {value!r} transforms the logits outside the output layer.",
                "run this model unfused; the fused head supports MuP's output multiplier only.",
            )
