"""``KernelOptions``: everything a call of the kernel can set besides its tensors, made once at the door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_fused.kernel.schedule import DEFAULT_WORKSPACE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BACKENDS", "REDUCTIONS", "KernelOptions"]

BACKENDS = ("auto", "triton", "torch")
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, eq=False)
class KernelOptions:
    """Options of one call; :func:`mcore_fused.linear_cross_entropy` documents the values that a caller may pass.

    In the options of a checked call (:class:`mcore_fused.kernel.arguments.Call`) ``tp_group`` is None unless ranks
    exchange something, ``backend`` is the path that computes ("torch" or "triton"), and ``logits_budget_bytes`` is 0
    if no gradient is wanted.

    Attributes:
        temperature: number or tensor of the labels' shape, above 0.
        reduction: "none", "sum" or "mean".
        tp_group: torch.distributed group over which the vocabulary is sharded, or None.
        ignore_index: label of the rows that do not count.
        scale: logit multiplier, applied before the temperature.
        vocab_size: real rows of the global weight, or None for all.
        vocab_shard: first global row of this rank's weight and the rows of all ranks, or None to ask the other ranks.
        logits_budget_bytes: memory that the forward may keep for the backward.
        reduce_hidden_grad: sum the hidden gradient over ``tp_group``.
        check_labels: read labels and per-token temperatures on the host and refuse bad ones.
        backend: "auto", "triton" or "torch".
        workspace_bytes: memory that the backward may use beyond the gradients.
        gradient_accumulation_fusion: the weight gradient is added to ``weight.main_grad`` in the backward.
        counted_rows: upper bound of the rows that count, or None to compute all rows.
    """

    temperature: float | Tensor = 1.0
    reduction: str = "none"
    tp_group: Any = None
    ignore_index: int = -100
    scale: float = 1.0
    vocab_size: int | None = None
    vocab_shard: tuple[int, int] | None = None
    logits_budget_bytes: int = 0
    reduce_hidden_grad: bool = True
    check_labels: bool = False
    backend: str = "auto"
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    gradient_accumulation_fusion: bool = False
    counted_rows: int | None = None
