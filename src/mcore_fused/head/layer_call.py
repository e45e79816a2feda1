"""Run the fused computation as the forward of a real call of the output layer.

Parameter sharding works through hooks on module calls: the pre-forward hook gathers the weight, the post-forward hook
frees it and marks the outputs so that the backward gathers it again, and a function around the inputs reduces the
gradient (torch's ``fully_shard``, Megatron-FSDP; DDP's overlapped gather only waits). Therefore the computation
replaces the layer's ``forward`` for one call, takes hidden states and weight from the hooks, and returns tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from mcore_fused.errors import UnsupportedConfigError, qualified_name
from mcore_fused.head.fsdp import check_gathered, free_gathered
from mcore_fused.model.instance import own_attribute, replaced

__all__ = ["Compute", "ForwardOverride", "call_with_layer_hooks", "get_weight", "override_forward"]

Compute = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

# If set, torch calls this instead of hooks and forward (``Module.compile`` sets it).
_CALL = "_compiled_call_impl"


class ForwardOverride:
    """A temporary replacement of a layer's ``forward``.

    Attributes:
        layer: the layer.
        call_before: the layer's compiled call before the replacement; None if it was not compiled.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.call_before = own_attribute(layer, _CALL)


def get_weight(layer: nn.Module) -> torch.Tensor:
    """Return the layer's own weight; for layers that have one."""
    return cast(torch.Tensor, layer.weight)


@contextlib.contextmanager
def override_forward(layer: nn.Module, forward: Callable[..., Any], *, call: object | None) -> Iterator[None]:
    """Replace the layer's forward on this instance for the duration of the context.

    Args:
        layer: the layer.
        forward: the replacement.
        call: what torch runs instead of hooks and forward; None runs both.
    """
    with replaced(layer, "forward", forward), replaced(layer, _CALL, call):
        yield


def call_with_layer_hooks(
    layer: nn.Module, compute: Compute, hidden: torch.Tensor, arguments: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``layer`` with its hooks, and with ``compute`` instead of its forward.

    Args:
        layer: the output layer.
        compute: maps hidden states and the whole weight ``[vocab shard, hidden]`` to two tensors.
        hidden: what the model called the layer with.
        arguments: the other arguments of that call, including ``weight`` (None for the layer's own).

    Returns:
        The result of ``compute`` after the layer's hooks.

    Raises:
        UnsupportedOutputLayerError: the weight is still a shard inside the call.
        UnsupportedConfigError: a hook changed the dtype of the outputs.
    """
    computation = _Computation(layer, compute)
    try:
        with override_forward(layer, computation, call=None):
            first, second = layer(hidden, **arguments)
    except BaseException:
        free_gathered(layer)  # the post-forward hook that does it did not run
        raise
    if first.dtype is not computation.dtype:
        raise UnsupportedConfigError(
            f"a hook on output layer {qualified_name(layer)} turned its outputs from {computation.dtype} "
            f"into {first.dtype}.",
            "leave output_dtype out of the mixed-precision policy of the unit that holds the output layer.",
        )
    return first, second


class _Computation(ForwardOverride):
    """A computation that replaces a layer's forward."""

    def __init__(self, layer: nn.Module, compute: Compute) -> None:
        super().__init__(layer)
        self.compute = compute
        self.dtype: torch.dtype | None = None

    def __call__(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute with the weight that the stock layer would use; there are no logits to gather."""
        del runtime_gather_output
        chosen = weight if weight is not None else get_weight(self.layer)
        check_gathered(chosen, shared=weight is not None)
        first, second = self.compute(input_, chosen)
        self.dtype = first.dtype
        return first, second
