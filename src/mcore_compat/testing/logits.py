"""Count the tensors that hold one number for every token and every word of the vocabulary.

A fused head never materialises the logits. :class:`LogitsCounter` watches every operation of a block, forward and
backward, below autograd, and records each result that is large enough to be the logits::

    with LogitsCounter(tokens=batch.labels.numel(), vocab=vocab) as counter:
        output = fused_forward(model, batch)
        output.log_probs.sum().backward()
    counter.check()

Use a problem in which nothing else is that large: more tokens than twice the hidden size (the weight and its gradient
have ``vocab * hidden`` numbers), and a vocabulary above the chunk size of the head under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LogitsCounter", "LogitsMaterialisedError"]

_SHOWN = 4


class LogitsMaterialisedError(AssertionError):
    """A block that must not materialise the logits did so."""


class LogitsCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records results of at least ``share * tokens * vocab`` numbers, for the duration of a ``with`` block.

    The backward must run inside the block as well. Views of a recorded tensor count once more each; what matters is
    that the count is zero. Memory that a foreign kernel allocates by itself is not seen; what it returns is.

    Attributes:
        largest: the most numbers that any result of the block held.
        found: operation and shape of each result that is large enough to be the logits.
    """

    def __init__(self, *, tokens: int, vocab: int, share: float = 0.5) -> None:
        """Prepare the counter.

        Args:
            tokens: tokens of the batch.
            vocab: rows of the vocabulary on this rank.
            share: the part of ``tokens * vocab`` from which a tensor counts; a half finds logits that are computed
                in two pieces, too.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = share * tokens * vocab
        self.largest = 0
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at the size of what it returns."""
        del types
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
                if value.numel() >= self._limit:
                    self.found.append((str(func), tuple(value.shape)))
        return result

    def check(self) -> None:
        """Raise if the block made a tensor that is large enough to be the logits.

        Raises:
            LogitsMaterialisedError: it did; the message names the operations and the shapes.
        """
        if self.found:
            listed = ", ".join(f"{name} -> {list(shape)}" for name, shape in self.found[:_SHOWN])
            more = f" and {len(self.found) - _SHOWN} more" if len(self.found) > _SHOWN else ""
            raise LogitsMaterialisedError(
                f"The logits were materialised: {listed}{more}. Compute them in chunks of tokens or of the vocabulary; "
                "to find the line, raise an error from LogitsCounter.__torch_dispatch__ at the first of them."
            )
