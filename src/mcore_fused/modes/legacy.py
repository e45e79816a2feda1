"""Legacy mode: replace one instance's ``forward`` with one that accepts an output processor on any release.

Upstream's forward is neither copied nor changed. For the duration of one call, on one instance, the output layer
defers its product and ``compute_language_model_loss`` runs the fused head. Everything else that upstream's forward
does (MTP and its loss, MuP, offloading, packed sequences) is unchanged. Other output processors than the fused one get
the keywords that the hook of megatron-core 0.18 hands over.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mcore_fused import evidence
from mcore_fused.errors import CallTypeError, UnsupportedConfigError
from mcore_fused.head.supported import get_head
from mcore_fused.model.instance import get_lock
from mcore_fused.model.signature import arguments_by_name, forward_parameters, takes_any_keyword
from mcore_fused.modes.deferral import run_with_deferred_head, run_with_processor, stock_head
from mcore_fused.modes.hook import HOOK_PARAMETERS, fused_output_processor
from mcore_fused.outputs import FusedCall, FusedOutputProcessorContext

__all__ = ["LegacyForward"]

_TEMPERATURE = "temperature"


class LegacyForward:
    """Callable stored as ``forward`` on one model instance.

    It is an object and not a closure so that ``copy.deepcopy`` and ``pickle`` rebuild it around the copied model, and
    a copy computes with its own weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        forward_parameters(self.original)  # read when the model is patched, not in its first call

    @property
    def original(self) -> Callable[..., Any]:
        """The class's own forward, bound to this model."""
        bound: Callable[..., Any] = type(self._model).forward.__get__(self._model)
        return bound

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters of the original, and those that this forward adds (callers inspect ``forward``)."""
        signature = inspect.signature(self.original)
        parameters = list(signature.parameters.values())
        end = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        own = HOOK_PARAMETERS if _takes_temperature(signature.parameters) else (_TEMPERATURE, *HOOK_PARAMETERS)
        parameters[end:end] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in own
            if name not in signature.parameters
        ]
        return signature.replace(parameters=parameters)

    def __call__(
        self,
        *args: Any,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model, with an output processor if one is given, and stock otherwise.

        Args:
            *args: as the model's own forward.
            output_processor: a callable with the hook's contract (megatron-core 0.18, ``GPTModel.forward``).
            output_processor_context: passed to the processor as ``context``.
            **kwargs: as the model's own forward. ``temperature`` is a shorthand for the fused processor with this
                temperature, unless the model's own forward takes that argument.

        Returns:
            What the processor returns on a stage with a head; otherwise what stock returns.

        Raises:
            FusionDidNotRunError: the model did not ask its head for the loss of these labels exactly once.
            UnsupportedModelError: (also its subclasses for output layer and config) the fused head would lose
                something.
            UnsupportedConfigError: an inference context was passed.
            CallTypeError: temperature and processor were both given.
        """
        parameters = forward_parameters(self.original)
        if _TEMPERATURE in kwargs and not _takes_temperature(parameters):
            temperature = kwargs.pop(_TEMPERATURE)
            if temperature is not None:
                if output_processor is not None or output_processor_context is not None:
                    raise CallTypeError(
                        "both temperature and output_processor were given.",
                        "put the temperature into the processor's context.",
                    )
                output_processor = fused_output_processor
                output_processor_context = FusedOutputProcessorContext(temperature=temperature)
        with get_lock(self._model):
            layer = get_head(self._model)
            if layer is None:
                return self.original(*args, **kwargs)
            if output_processor is None:
                with stock_head(self._model, layer):
                    return self.original(*args, **kwargs)
            passed = arguments_by_name(parameters, args, kwargs)
            run = functools.partial(self.original, *args, **kwargs)
            if output_processor is fused_output_processor:
                return self._fused(layer, output_processor_context, passed, run)
            _refuse_inference(passed)
            return run_with_processor(self._model, layer, output_processor, output_processor_context, passed, run)

    def _fused(self, layer: nn.Module, context: object, passed: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        labels = passed.get("labels")
        if labels is None:
            evidence.record(layer, unfused_fallbacks=1)
            with stock_head(self._model, layer):
                return run()
        _refuse_inference(passed)
        return run_with_deferred_head(self._model, layer, labels, FusedCall.from_context(context), run)


def _takes_temperature(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether an argument ``temperature`` may be the model's own; it is passed on then."""
    return _TEMPERATURE in parameters or takes_any_keyword(parameters)


def _refuse_inference(passed: Mapping[str, Any]) -> None:
    if passed.get("inference_context") is not None or passed.get("inference_params") is not None:
        raise UnsupportedConfigError(
            "an output processor was requested together with an inference context.",
            "drop output_processor during generation; call the fused forward for training and log-prob passes.",
        )
