"""Legacy mode: a stand-in for one instance's ``forward`` that gives any model the hook's contract.

Upstream's forward is neither copied nor changed. For the duration of one call, on one instance, the output
layer defers its product and ``compute_language_model_loss`` runs the fused head instead. Whatever else
upstream's forward does (MTP and its loss, MuP, offloading, packed sequences) stays upstream's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mcore_fused import evidence
from mcore_fused.errors import CallTypeError, FusionDidNotRunError, UnsupportedConfigError, qualified_name
from mcore_fused.head.config_logger import fused_payload
from mcore_fused.head.deferred import DeferredLogits, deferred_output_layer, stock_output_layer
from mcore_fused.head.fused import fused_head, fused_loss
from mcore_fused.head.supported import head_of
from mcore_fused.model.instance_attribute import own_attribute, replaced
from mcore_fused.model.model_lock import lock_of
from mcore_fused.modes.hook import HOOK_PARAMETERS, checked_context, fused_output_processor
from mcore_fused.outputs import FusedForwardOutput, FusedOutputProcessorContext

__all__ = ["LegacyForward", "run_with_deferred_head"]

_OURS = ("temperature", *HOOK_PARAMETERS)
_LOSS = "compute_language_model_loss"


class LegacyForward:
    """Callable stored as ``forward`` on one model instance.

    An object and not a closure: ``copy.deepcopy`` and ``pickle`` rebuild it around the copied model, so that a
    copy computes with its own weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def original(self) -> Callable[..., Any]:
        """The class's own forward, bound to this model."""
        bound: Callable[..., Any] = type(self._model).forward.__get__(self._model)
        return bound

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's parameters, plus ours where it lacks them (callers inspect ``forward``)."""
        signature = inspect.signature(self.original)
        parameters = list(signature.parameters.values())
        at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        parameters[at:at] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in _OURS
            if name not in signature.parameters
        ]
        return signature.replace(parameters=parameters)

    def __call__(
        self,
        *args: Any,
        temperature: float | torch.Tensor | None = None,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model; fused when ``temperature`` or ``output_processor`` asks for it, stock otherwise.

        Args:
            *args: as the model's own forward.
            temperature: shorthand for the fused processor with this temperature.
            output_processor: a callable with the hook's contract (megatron-core 0.18, ``GPTModel.forward``).
            output_processor_context: handed to the processor as ``context``.
            **kwargs: as the model's own forward.

        Returns:
            :class:`FusedForwardOutput` on a stage with a head and with labels; otherwise what stock returns.

        Raises:
            FusionDidNotRunError: the model returned and its head was never asked for the loss of these labels.
            UnsupportedConfigError: an inference context was passed.
            CallTypeError: temperature and processor contradict each other.
        """
        if temperature is not None:
            if output_processor is not None or output_processor_context is not None:
                raise CallTypeError(
                    "both temperature and output_processor were given.",
                    "put the temperature into the processor's context.",
                )
            output_processor = fused_output_processor
            output_processor_context = FusedOutputProcessorContext(temperature=temperature)
        with lock_of(self._model):
            layer = head_of(self._model)
            if layer is None:
                return self.original(*args, **kwargs)
            if output_processor is None:
                with _stock_head(self._model, layer):
                    return self.original(*args, **kwargs)
            return self._processed(layer, output_processor, output_processor_context, args, kwargs)

    def _processed(
        self, layer: nn.Module, processor: Callable[..., Any], context: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        passed = self._passed(args, kwargs)
        labels = passed.get("labels")
        if labels is None:
            evidence.record(layer, unfused_fallbacks=1)
            with _stock_head(self._model, layer):
                return self.original(*args, **kwargs)
        if passed.get("inference_context") is not None or passed.get("inference_params") is not None:
            raise UnsupportedConfigError(
                "fused log-probs were asked for together with an inference context.",
                "drop output_processor during generation; call the fused forward for training and log-prob passes.",
            )
        if processor is not fused_output_processor:
            raise CallTypeError(
                f"legacy mode got the output processor {qualified_name(processor)}; only fused_output_processor runs.",
                "pass mcore_fused.fused_output_processor, or run a megatron-core whose forward has the hook.",
            )
        context = checked_context(context)
        return run_with_deferred_head(self._model, layer, labels, context, lambda: self.original(*args, **kwargs))

    def _passed(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name, however they were passed, without filling in defaults."""
        bound = inspect.signature(self.original).bind_partial(*args, **kwargs)
        by_name = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                by_name |= by_name.pop(parameter.name, {})
        return by_name


def run_with_deferred_head(
    model: nn.Module,
    layer: nn.Module,
    labels: torch.Tensor,
    context: FusedOutputProcessorContext,
    run: Callable[[], Any],
) -> Any:
    """Run a piece of the model that ends in head and loss, with both deferred into the fused head.

    Args:
        model: the language model, touched on this instance and for this call only.
        layer: its output layer.
        labels: the very object that the model will hand to ``compute_language_model_loss``.
        context: settings of the call.
        run: the piece of the model.

    Returns:
        What ``run`` returns.

    Raises:
        FusionDidNotRunError: ``run`` ended and the head was never asked for the loss of these labels.
    """
    loss = _DeferredLoss(labels, context)
    with lock_of(model), deferred_output_layer(layer, loss.payload), replaced(model, _LOSS, loss):
        result = run()
    if loss.output is None:
        raise FusionDidNotRunError(
            f"{qualified_name(model)} returned a {qualified_name(result)} and never asked its head "
            "for the loss of the labels it was given.",
            "a subclass or another patch bypasses the head, or changes the labels; run unfused, and report it.",
        )
    evidence.record(layer, deferred_head_calls=1)
    context.runs.append("legacy")
    return result


class _DeferredLoss:
    """Stands in for ``compute_language_model_loss`` during one call."""

    def __init__(self, labels: torch.Tensor, context: FusedOutputProcessorContext) -> None:
        self.labels = labels
        self.context = context
        self.output: FusedForwardOutput | torch.Tensor | None = None

    def __call__(self, labels: torch.Tensor, logits: object) -> FusedForwardOutput | torch.Tensor:
        """The caller's own labels get the fused outputs, any other labels (MTP's) their per-token loss."""
        if not isinstance(logits, DeferredLogits):
            raise FusionDidNotRunError(
                f"the loss was asked for with a {qualified_name(logits)} in place of deferred logits.",
                "the model computes its logits elsewhere; run unfused, and report the class.",
            )
        if labels is not self.labels:
            return fused_loss(logits, labels, self.context)
        return self._resolve(logits)

    def payload(self, logits: DeferredLogits) -> dict[str, torch.Tensor]:
        """What the config logger saves in place of the logits."""
        return fused_payload(self._resolve(logits))

    def _resolve(self, logits: DeferredLogits) -> FusedForwardOutput | torch.Tensor:
        if self.output is None:
            self.output = fused_head(logits, self.labels, self.context)
        return self.output


@contextlib.contextmanager
def _stock_head(model: nn.Module, layer: nn.Module) -> Iterator[None]:
    """A stock forward, also when it runs inside a fused one of the same model."""
    with stock_output_layer(layer):
        if not isinstance(own_attribute(model, _LOSS), _DeferredLoss):
            yield
            return
        with replaced(model, _LOSS, getattr(type(model), _LOSS).__get__(model)):
            yield
