"""Gradient accumulation fusion: the weight gradient is added to ``weight.main_grad`` inside the backward.

Megatron's linear layers do so with ``gradient_accumulation_fusion`` (megatron-core ``tensor_parallel/layers.py``), and
its data-parallel wrappers rely on it: a weight marked ``grad_added_to_main_grad`` has its autograd gradient dropped,
except with ``zero_out_wgrad`` (a weight that another layer of the stage uses, too), where the gradient is added. All
users of one weight must therefore keep the same books, whichever of them runs first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_fused.errors import CallArgumentError

__all__ = ["MainGrad"]


class MainGrad:
    """The ``main_grad`` of one weight, for one call.

    Attributes:
        weight: the parameter itself, which carries the attributes of Megatron's data-parallel wrappers.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        # as in Megatron since 0.13: the buffer at the time of the forward
        self._main_grad: Tensor | None = getattr(weight, "main_grad", None)

    def open(self) -> Tensor:
        """The tensor ``[V, H]`` that the gradient has to be added to.

        Raises:
            CallArgumentError: nothing has given the weight a ``main_grad`` of its shape.
        """
        weight = self.weight
        if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP hands out a buffer per backward, and reduces it at once
            buffer: Tensor = weight.get_main_grad()  # type: ignore[attr-defined]
            weight.main_grad = buffer  # type: ignore[attr-defined]
            return buffer.zero_()
        if self._main_grad is None or self._main_grad.shape != weight.shape:
            raise CallArgumentError(
                f"gradient_accumulation_fusion is on and the weight of shape {list(weight.shape)} has no main_grad "
                "of that shape.",
                "wrap the model in Megatron's DistributedDataParallel before its first forward, or turn "
                "gradient_accumulation_fusion off.",
            )
        weight.main_grad = self._main_grad  # type: ignore[attr-defined]
        return self._main_grad

    def close(self, dtype: torch.dtype) -> Tensor | None:
        """Mark the weight; returns what autograd gets in place of the gradient, in the product's ``dtype``.

        A tensor, so that the wrapper's hook runs on the thread of the backward. Its values are only read with
        ``zero_out_wgrad``.
        """
        weight = self.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(weight.shape, dtype=dtype, device=weight.device)
