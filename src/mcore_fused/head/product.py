"""Compare what an output layer computes with ``hidden @ weight.T``, once, on two rows.

The class of a layer does not say everything: an option of the layer, or a forward that was replaced on the class, may
cap or scale the logits. The comparison runs the layer's own forward on a few known numbers, without its hooks, its
parameters or a collective. The result is remembered for the plain options of the layer, so that later calls compare
the options only, without a device synchronisation.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from mcore_fused.errors import UnsupportedOutputLayerError, qualified_name

__all__ = ["check_product"]

_PLAIN = frozenset({bool, int, float, str, type(None)})
_REMEMBERED = 8
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Powers of two and their small multiples: every product below is exact in bf16 and fp16.
_FIRST = (-8.0, 0.5, 3.0, 512.0)
_LAST = (4096.0, -2.0, 0.0, 1.0)

Options = tuple[Any, dict[str, Any]]
_verified: weakref.WeakKeyDictionary[nn.Module, list[Options]] = weakref.WeakKeyDictionary()


def check_product(layer: nn.Module, like: torch.Tensor) -> None:
    """Check that the layer computes the plain product.

    Args:
        layer: a ``ColumnParallelLinear`` whose class, hooks and parameters were checked before.
        like: a tensor on the layer's device and with its dtype; only these two are read.

    Raises:
        UnsupportedOutputLayerError: the layer's result differs from the product, or its forward fails.
    """
    options = _options(layer)
    verified = _verified.get(layer)
    if verified is not None and options in verified:
        return
    if like.device.type == "meta" or like.dtype not in _FLOATING:
        return  # nothing can be computed; the weight is checked by itself
    _compare(layer, like)
    if verified is None or len(verified) >= _REMEMBERED:
        verified = _verified[layer] = []
    verified.append(options)


def _options(layer: nn.Module) -> Options:
    """Return the function that the class runs, and everything plain that is set on the layer."""
    return type(layer).forward, {name: value for name, value in vars(layer).items() if type(value) in _PLAIN}


@torch.no_grad()
def _compare(layer: nn.Module, like: torch.Tensor) -> None:
    width = _width(layer, like)
    hidden = torch.zeros(2, 1, width, dtype=like.dtype, device=like.device)
    weight = torch.zeros(len(_FIRST), width, dtype=like.dtype, device=like.device)
    hidden[0, 0, 0] = hidden[1, 0, -1] = 1
    weight[:, 0] = weight.new_tensor(_FIRST)
    weight[:, -1] = weight.new_tensor(_LAST)
    # A second object with the attributes of the first: what a forward stores on itself does not reach the layer.
    twin: Any = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    vars(twin).update(
        weight=weight,
        sequence_parallel=False,
        gather_output=False,
        allreduce_dgrad=False,
        disable_grad_reduce=True,
        gradient_accumulation_fusion=False,
        embedding_activation_buffer=[],
    )
    try:
        logits, _ = type(layer).forward(twin, hidden, None, False)
    except Exception as error:
        raise UnsupportedOutputLayerError(
            f"the forward of output layer {qualified_name(layer)} failed on two rows of known values: "
            f"{type(error).__name__}: {error}",
            "run this model unfused, and report the traceback.",
        ) from error
    expected = hidden.double().cpu() @ weight.double().cpu().T
    if not isinstance(logits, torch.Tensor) or not torch.equal(logits.double().cpu(), expected):
        raise UnsupportedOutputLayerError(
            f"output layer {qualified_name(layer)} computes something else than hidden @ weight.T: an option or a "
            "replaced forward caps or scales its logits.",
            "switch that option off, or run this model unfused.",
        )


def _width(layer: nn.Module, like: torch.Tensor) -> int:
    size = getattr(layer, "input_size", None)
    return size if isinstance(size, int) else like.shape[-1]
