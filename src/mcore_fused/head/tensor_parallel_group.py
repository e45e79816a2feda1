"""The process group over which a head's vocabulary is sharded."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["tensor_parallel_group"]


def tensor_parallel_group(layer: nn.Module) -> torch.distributed.ProcessGroup | None:
    """The group over which this layer's vocabulary is sharded; None when it is not.

    The layer's own group where it has one (``tp_group``, megatron-core 0.13 and later), because a model built
    with explicit process groups may differ from the global ones; the global group before that.
    """
    group = getattr(layer, "tp_group", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None
