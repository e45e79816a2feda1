"""Run a piece of a model with its head deferred: the layer's product, and the loss that follows it.

Used by legacy mode for a whole forward, and by the schedule plan for its last node.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mcore_fused import evidence
from mcore_fused.errors import FusionDidNotRunError, qualified_name
from mcore_fused.head.config_logger import fused_payload
from mcore_fused.head.deferred import DeferredLogits, deferred_output_layer, stock_output_layer
from mcore_fused.head.fused import fused_head, fused_loss
from mcore_fused.head.product import check_product
from mcore_fused.head.supported import check_fused_call
from mcore_fused.model.instance import get_lock, own_attribute, replaced
from mcore_fused.outputs import FusedCall, FusedForwardOutput, FusedOutputProcessorContext

__all__ = ["run_with_deferred_head", "run_with_processor", "stock_head"]

_LOSS = "compute_language_model_loss"


def run_with_deferred_head(
    model: nn.Module, layer: nn.Module, labels: torch.Tensor, call: FusedCall, run: Callable[[], Any]
) -> Any:
    """Run a piece of the model that ends in head and loss, and compute the fused head instead of both.

    Args:
        model: the language model; changed on this instance and for this call only.
        layer: its output layer.
        labels: the object that the model passes to ``compute_language_model_loss``.
        call: settings of the call; receives the receipt.
        run: the piece of the model.

    Returns:
        What ``run`` returns.

    Raises:
        FusionDidNotRunError: ``run`` did not ask the head for the loss of these labels exactly once.
        UnsupportedModelError: (also its subclasses for output layer and config) the fused head would lose something.
    """
    check_fused_call(layer, model.config, getattr(model, _LOSS))

    def fuse(logits: DeferredLogits) -> FusedForwardOutput | torch.Tensor:
        check_product(layer, logits.hidden)
        return fused_head(logits, labels, call.settings)

    loss = _DeferredLoss(labels, call.settings, fuse)

    def payload(logits: DeferredLogits) -> dict[str, torch.Tensor]:
        return fused_payload(loss.resolve(logits))

    with get_lock(model), deferred_output_layer(layer, payload), replaced(model, _LOSS, loss):
        result = run()
    if not loss.resolved:
        raise FusionDidNotRunError(
            f"{qualified_name(model)} returned a {qualified_name(result)} without asking its head for the loss of the "
            "labels that it was given.",
            "a subclass or another patch bypasses the head, or changes the labels; run unfused, and report it.",
        )
    evidence.record(layer, deferred_head_calls=1)
    call.receipts.append("legacy")
    return result


def run_with_processor(
    model: nn.Module,
    layer: nn.Module,
    processor: Callable[..., Any],
    context: object,
    passed: Mapping[str, Any],
    run: Callable[[], Any],
) -> Any:
    """Run a model's forward with an output processor, as the hook of megatron-core 0.18 does.

    The processor is called once, after the decoder and MTP, with the keywords of that hook; what it returns is what
    the model returns. During its call the output layer and the loss method are stock.

    Args:
        model: the language model; changed on this instance and for this call only.
        layer: its output layer.
        processor: the output processor.
        context: passed to the processor as ``context``.
        passed: the arguments of the forward, by name.
        run: the forward.

    Returns:
        What ``run`` returns.

    Raises:
        FusionDidNotRunError: the forward did not come to the end of its head exactly once.
        UnsupportedModelError: (also its subclasses for output layer and config) the head cannot be deferred.
    """
    check_fused_call(layer, model.config, getattr(model, _LOSS))
    labels = passed.get("labels")
    seen: dict[str, Any] = {"decoder_input": passed.get("decoder_input")}

    def process(logits: DeferredLogits) -> Any:
        scale = logits.scale
        with stock_head(model, layer):
            return processor(
                hidden_states=logits.hidden,
                output_layer=layer,
                output_weight=logits.weight,
                labels=labels,
                loss_mask=passed.get("loss_mask"),
                input_ids=passed.get("input_ids"),
                position_ids=passed.get("position_ids"),
                attention_mask=passed.get("attention_mask"),
                decoder_input=seen["decoder_input"],
                inference_context=None,
                packed_seq_params=passed.get("packed_seq_params"),
                runtime_gather_output=logits.runtime_gather_output,
                context=context,
                compute_language_model_loss=getattr(model, _LOSS),
                scale_logits=lambda unscaled: unscaled if scale == 1.0 else unscaled * scale,
                config=model.config,
            )

    loss = _DeferredLoss(labels, FusedOutputProcessorContext(), process)
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_lock(model))
        stack.enter_context(_decoder_input(model, seen))
        if getattr(model.config, "config_logger_dir", ""):  # with a processor the hook comes before the logger
            stack.enter_context(replaced(model.config, "config_logger_dir", ""))
        stack.enter_context(deferred_output_layer(layer, result=loss.resolve))
        stack.enter_context(replaced(model, _LOSS, loss))
        result = run()
    if not loss.resolved:
        raise FusionDidNotRunError(
            f"{qualified_name(model)} returned a {qualified_name(result)} without calling its output processor.",
            "a subclass or another patch bypasses the head; call the model without output_processor, and report it.",
        )
    return result


@contextlib.contextmanager
def stock_head(model: nn.Module, layer: nn.Module) -> Iterator[None]:
    """Make the head stock, also inside a fused call of the same model."""
    with stock_output_layer(layer):
        if not isinstance(own_attribute(model, _LOSS), _DeferredLoss):
            yield
            return
        with replaced(model, _LOSS, getattr(type(model), _LOSS).__get__(model)):
            yield


@contextlib.contextmanager
def _decoder_input(model: nn.Module, seen: dict[str, Any]) -> Iterator[None]:
    """Note the embeddings that the decoder is called with; the hook hands them over as ``decoder_input``."""
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, nn.Module):
        yield
        return

    def note(_decoder: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["decoder_input"] = kwargs.get("hidden_states", seen["decoder_input"])

    handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _DeferredLoss:
    """Replaces ``compute_language_model_loss`` during one call.

    Attributes:
        resolved: whether the head was asked for the loss of the caller's labels.
    """

    def __init__(
        self,
        labels: torch.Tensor | None,
        settings: FusedOutputProcessorContext,
        compute: Callable[[DeferredLogits], Any],
    ) -> None:
        self.labels = labels
        self.settings = settings
        self.resolved = False
        self._compute = compute
        self._output: Any = None
        self._logits: weakref.ref[DeferredLogits] | None = None  # weak: the handle holds activations

    def __call__(self, labels: torch.Tensor, logits: object) -> Any:
        """Return the outputs for the caller's own labels, and the per-token loss for any others (MTP's)."""
        if not isinstance(logits, DeferredLogits):
            raise FusionDidNotRunError(
                f"the model asked for its loss with a {qualified_name(logits)} instead of deferred logits.",
                "the model computes its logits elsewhere; run unfused, and report the class.",
            )
        if labels is not self.labels:
            return fused_loss(logits, labels, self.settings)
        return self.resolve(logits)

    def resolve(self, logits: DeferredLogits) -> Any:
        """Compute the outputs once; the config logger and the loss may both ask for those of the same logits.

        Raises:
            FusionDidNotRunError: the model asks for the outputs of other logits and the same labels.
        """
        if self._logits is None:
            self._logits = weakref.ref(logits)
            self._output = self._compute(logits)
            self.resolved = True
        elif self._logits() is not logits:
            raise FusionDidNotRunError(
                "the model asked its head twice for the loss of the same labels, with different logits.",
                'use mode="hook" if this megatron-core has the hook, or run this model unfused.',
            )
        return self._output
