"""Deferred logits: what the output layer returns when its product is deferred.

Upstream's forward runs unchanged: it calls the output layer, may scale the result (MuP), and passes it to
``compute_language_model_loss``. The handle carries the arguments of the call to that point. Any other operation on it
means that upstream has changed, and raises at the line that caused it.

The deferred call runs none of the layer's hooks. They run once, around the computation that replaces the product
(:mod:`mcore_fused.head.layer_call`), because DDP's ``overlap_param_gather`` and FSDP gather the weight there.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from mcore_fused.errors import DeferredLogitsError
from mcore_fused.head.layer_call import Compute, ForwardOverride, call_with_layer_hooks, get_weight, override_forward
from mcore_fused.head.tensor_parallel import tensor_parallel_group
from mcore_fused.head.vocab_argmax import vocabulary_maximum
from mcore_fused.model.instance import own_attribute

__all__ = ["DeferredForward", "DeferredLogits", "deferred_output_layer"]


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """``scale * hidden @ weight.T``, not computed.

    Attributes:
        hidden: ``[seq, batch, hidden]``, sharded along seq when ``sequence_parallel``.
        weight: ``[vocab shard, hidden]`` that the model handed to the layer; None for the layer's own.
        layer: the output layer that was called.
        sequence_parallel: the layer's own flag at the time of the call.
        runtime_gather_output: as the model passed it.
        gathered: the caller or the layer asked for the logits of all tensor-parallel ranks.
        scale: product of all numbers the logits were multiplied by.
        payload: computes what a pickle of the handle contains instead of logits; None refuses pickling.
        result: computes what a model without labels returns instead of ``[batch, seq, vocab]`` logits; None refuses
            the transposition with which the model would return them.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | None
    layer: nn.Module
    sequence_parallel: bool
    runtime_gather_output: bool | None = None
    gathered: bool = False
    scale: float = 1.0
    payload: Callable[[DeferredLogits], dict[str, torch.Tensor]] | None = None
    result: Callable[[DeferredLogits], Any] | None = None

    def call_with_layer_hooks(self, compute: Compute) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``compute(hidden, weight)`` inside a call of the layer, with the inputs that the stock forward gets."""
        arguments = {"weight": self.weight, "runtime_gather_output": self.runtime_gather_output}
        return call_with_layer_hooks(self.layer, compute, self.hidden, arguments)

    def __mul__(self, factor: object) -> DeferredLogits:
        if isinstance(factor, torch.Tensor) and factor.numel() == 1 and not factor.requires_grad:
            factor = factor.item()
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
            self._refuse(f"multiplication by a {type(factor).__name__}")
        return replace(self, scale=self.scale * float(factor))

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[type[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor]]]:
        # Megatron's config logger saves the logits with torch.save; without logits it saves what replaces them.
        if self.payload is None:
            self._refuse("pickling")
        return dict, (self.payload(self),)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # protocol look-ups (copy, pickle, numpy) must get their usual answer
        if name == "transpose" and self.result is not None:
            return self._transpose
        return self._refuse(f"attribute or method {name!r}")

    def _transpose(self, *dims: int) -> _TransposedLogits:
        if dims != (0, 1) or self.result is None:
            self._refuse(f"transposition of dimensions {dims}")
        return _TransposedLogits(self, self.result)

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest logit and its column over this rank's vocabulary; MTP's acceptance count asks for it (0.19)."""
        group = tensor_parallel_group(self.layer)
        if dim not in (-1, 2) or (self.gathered and group is not None):
            self._refuse(f"max over dimension {dim} of {'gathered' if self.gathered else 'sharded'} logits")
        over = group if self.sequence_parallel else None
        with torch.no_grad():
            return self.call_with_layer_hooks(
                lambda hidden, weight: vocabulary_maximum(hidden, weight, self.scale, over)
            )

    def size(self, dim: int) -> int:
        """Number of columns of this rank's shard, the one size that upstream asks for (0.19)."""
        if dim not in (-1, 2):
            self._refuse(f"size of dimension {dim}")
        return (self.weight if self.weight is not None else get_weight(self.layer)).shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        """Answer ``torch.argmax`` over the vocabulary, refuse every other function: the logits do not exist."""
        if func is torch.argmax and len(args) == 1 and kwargs == {"dim": -1} and isinstance(args[0], cls):
            columns: torch.Tensor = args[0].max(dim=-1)[1]
            return columns
        return cls._refuse(f"torch function {getattr(func, '__name__', func)!r}")

    @staticmethod
    def _refuse(operation: str) -> NoReturn:
        raise DeferredLogitsError(
            f"the model applied an unsupported operation to its logits: {operation}.",
            "this megatron-core transforms logits in a new way; run unfused, and report the traceback's line.",
        )


def _refusing(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: DeferredLogits, *_: object) -> NoReturn:
        self._refuse(f"operator {operation}")

    return refuse


# Every operator that a tensor answers, other than the multiplication above.
_REFUSED_OPERATORS = """
    add radd iadd sub rsub isub imul truediv rtruediv itruediv floordiv mod pow rpow matmul rmatmul
    neg pos abs invert and or xor lt le gt ge eq ne
    getitem setitem iter len contains bool float int index array
"""
for _operator in _REFUSED_OPERATORS.split():
    setattr(DeferredLogits, f"__{_operator}__", _refusing(f"__{_operator}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


class _TransposedLogits:
    """Deferred logits on their way out of a model that was called without labels: made contiguous and returned."""

    def __init__(self, logits: DeferredLogits, result: Callable[[DeferredLogits], Any]) -> None:
        self._logits = logits
        self._result = result

    def contiguous(self) -> Any:
        """Return what the model returns instead of logits."""
        return self._result(self._logits)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise DeferredLogitsError(
            f"the model applied an unsupported operation to its logits: {name!r} after the transposition.",
            "this megatron-core returns its logits in a new way; run unfused, and report the traceback's line.",
        )


class DeferredForward(ForwardOverride):
    """Replaces the ``forward`` of one output layer during one call."""

    def __init__(
        self,
        layer: nn.Module,
        payload: Callable[[DeferredLogits], dict[str, torch.Tensor]] | None,
        result: Callable[[DeferredLogits], Any] | None = None,
    ) -> None:
        super().__init__(layer)
        self.payload = payload
        self.result = result

    def __call__(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **unknown: object,
    ) -> tuple[DeferredLogits, None]:
        """Return the handle and no bias, as the stock layer returns logits and bias."""
        meaningful = sorted(name for name, value in unknown.items() if value is not None)
        if meaningful:
            raise DeferredLogitsError(
                f"the model called its output layer with unknown arguments: {', '.join(meaningful)}.",
                "this megatron-core asks its head for something new; run unfused, and report the arguments.",
            )
        if not isinstance(weight if weight is not None else self.layer.weight, torch.Tensor):
            raise DeferredLogitsError(
                "the output layer has no weight of its own and was given none.",
                "share_embeddings_and_output_weights must hand over the shared weight; check the model's construction.",
            )
        gathered = self.layer.gather_output if runtime_gather_output is None else runtime_gather_output
        return DeferredLogits(
            input_,
            weight,
            self.layer,
            sequence_parallel=bool(self.layer.sequence_parallel),
            runtime_gather_output=runtime_gather_output,
            gathered=bool(gathered),
            payload=self.payload,
            result=self.result,
        ), None


@contextlib.contextmanager
def deferred_output_layer(
    layer: nn.Module,
    payload: Callable[[DeferredLogits], dict[str, torch.Tensor]] | None = None,
    result: Callable[[DeferredLogits], Any] | None = None,
) -> Iterator[None]:
    """For the duration of the context, calling this layer instance returns :class:`DeferredLogits`.

    Args:
        layer: the output layer.
        payload: see :class:`DeferredLogits`.
        result: see :class:`DeferredLogits`.
    """
    deferred = DeferredForward(layer, payload, result)
    with override_forward(layer, deferred, call=deferred):
        yield


@contextlib.contextmanager
def stock_output_layer(layer: nn.Module) -> Iterator[None]:
    """Inside a deferred call, restore the layer's own forward (for a stock forward nested in a fused one)."""
    deferred = own_attribute(layer, "forward")
    if not isinstance(deferred, ForwardOverride):
        yield
        return
    with override_forward(layer, type(layer).forward.__get__(layer), call=deferred.call_before):
        yield
