"""The fused computation, run as the forward of a real call of the output layer.

Whatever shards a model's weights works through hooks on module calls: the pre-forward hook gathers the weight, the
post-forward hook frees it again and marks the outputs, so that the backward gathers it once more, and a function
around the inputs reduces the gradient afterwards (torch's ``fully_shard``, Megatron-FSDP, and DDP's overlapped
gather, which only waits). So the computation takes the place of the layer's ``forward`` for one call, takes hidden
states and weight as the hooks leave them, and returns tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from mcore_fused.errors import UnsupportedConfigError, qualified_name
from mcore_fused.head.fsdp import check_gathered, free_gathered
from mcore_fused.model.instance_attribute import own_attribute, replaced

__all__ = ["Compute", "StandIn", "in_layer_call", "standing_in", "weight_of"]

Compute = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

# What torch calls in place of hooks and forward, where it is set (it is how ``Module.compile`` works).
_CALL = "_compiled_call_impl"


class StandIn:
    """Something of ours that is a layer's ``forward`` for a while.

    Attributes:
        layer: the layer.
        call_before: what the layer had for ``Module.compile`` before, None where it was not compiled.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.call_before = own_attribute(layer, _CALL)


def weight_of(layer: nn.Module) -> torch.Tensor:
    """The layer's own weight, for layers that are known to have one."""
    return cast(torch.Tensor, layer.weight)


@contextlib.contextmanager
def standing_in(layer: nn.Module, forward: Callable[..., Any], *, call: object | None) -> Iterator[None]:
    """For the duration, ``forward`` is the layer's, on this instance only.

    Args:
        layer: the layer.
        forward: what takes the place of its forward.
        call: what torch runs in place of hooks and forward; None runs both.
    """
    with replaced(layer, "forward", forward), replaced(layer, _CALL, call):
        yield


def in_layer_call(
    layer: nn.Module, compute: Compute, hidden: torch.Tensor, arguments: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``layer`` with its hooks, and with ``compute`` in place of its forward.

    Args:
        layer: the output layer.
        compute: from hidden states and whole weight ``[vocab shard, hidden]`` to two tensors.
        hidden: what the model called the layer with.
        arguments: the other arguments of that call, ``weight`` (None for the layer's own) among them.

    Returns:
        What ``compute`` returned, as the layer's hooks hand it on.

    Raises:
        UnsupportedOutputLayerError: the weight is still a shard inside the call.
        UnsupportedConfigError: a hook changed the outputs' type.
    """
    computation = _Computation(layer, compute)
    try:
        with standing_in(layer, computation, call=None):
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


class _Computation(StandIn):
    """One computation as a layer's forward."""

    def __init__(self, layer: nn.Module, compute: Compute) -> None:
        super().__init__(layer)
        self.compute = compute
        self.dtype: torch.dtype | None = None

    def __call__(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute with the weight that the stock layer would use; gathering of logits has no meaning here."""
        del runtime_gather_output
        chosen = weight if weight is not None else weight_of(self.layer)
        check_gathered(chosen, shared=weight is not None)
        first, second = self.compute(input_, chosen)
        self.dtype = first.dtype
        return first, second
