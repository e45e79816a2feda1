"""The one form in which a call reaches a backend, and the form in which its forward comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist

from mcore_fused.kernel.options import KernelOptions

__all__ = ["Gradients", "Outcome", "Problem", "ReduceHidden", "exact_products", "ieee_fp32_products"]

# Starts the sum of a partial hidden gradient over the vocabulary shards; the result waits for it.
ReduceHidden = Callable[[Tensor], Callable[[], None]]
Gradients = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Problem:
    """Operands of one call on this rank.

    Attributes:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, this rank's rows, same dtype.
        logit_scale: scale / temperature, a number or ``[N]``.
        options: options of the checked call.
        real_rows: rows of ``weight`` that take part; those after it are padding.
        vocab_offset: id of the first row among the labels handed to the backend; 0 if those are local rows.
    """

    hidden: Tensor
    weight: Tensor
    logit_scale: float | Tensor
    options: KernelOptions
    real_rows: int
    vocab_offset: int = 0

    @property
    def ignore_index(self) -> int:
        """Label of the rows that do not count."""
        return self.options.ignore_index

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Vocabulary-parallel group, or None."""
        group: dist.ProcessGroup | None = self.options.tp_group
        return group


@dataclass
class Outcome:
    """What a forward leaves.

    Attributes:
        log_probs: ``[N]``.
        entropy: ``[N]``.
        labels: ``[N]``, as the backend was given them.
        rows: tensors ``[N]`` that the same backend's backward needs.
        path: what ran: "torch", "triton" or "gluon".
        kept: exponentials kept for the backward, or None. A backward consumes them.
    """

    log_probs: Tensor
    entropy: Tensor
    labels: Tensor
    rows: tuple[Tensor, ...]
    path: str
    kept: object | None = field(default=None, repr=False)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Inside, kernels go to ``device`` and products have the dtype of their operands: no autocast, no TF32.

    Costs next to nothing where the device is current and neither is on.
    """
    with ExitStack() as stack:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # torch's own operations follow their tensors; Triton launches on the current device
            stack.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(ieee_fp32_products())
        yield


class ieee_fp32_products:  # noqa: N801  (a context manager, named as one)
    """fp32 products inside are true fp32, also where the process has allowed TF32 on its GPUs."""

    def __enter__(self) -> None:
        matmul = torch.backends.cuda.matmul
        self._name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
        self._before = getattr(matmul, self._name)
        # untouched where there is nothing to forbid: reading the older switch after setting the newer one is an error
        self._changed = self._before not in ("none", "ieee", False)
        if self._changed:
            setattr(matmul, self._name, "ieee" if self._name == "fp32_precision" else False)

    def __exit__(self, *_: object) -> None:
        if self._changed:
            setattr(torch.backends.cuda.matmul, self._name, self._before)
