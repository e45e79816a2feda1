"""Modelled future Megatrons: thin subclasses of the newest real GPTModel, each with one change that may come.

None of these exists. Each is the release's own model with one thing changed, so that what the library does when it
meets such a release is known before it comes. The changes sit where upstream would make them: around
``_postprocess``, in ``forward``'s signature, or on the way from logits to the loss.
"""

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

try:  # on upstream's dev branch it is there
    from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule
except ImportError:

    class LinearCrossEntropyModule(ColumnParallelLinear):
        """Modelled on upstream's dev branch: the stock product, or the loss where the caller asks for it."""

        def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False, **kwargs):
            assert not output_cross_entropy_loss, "the loss is not modelled"
            return super().forward(input_, weight, runtime_gather_output, **kwargs)

    LinearCrossEntropyModule.__module__ = "megatron.core.transformer.linear_cross_entropy"


def _changed(processor, change):
    """The processor as the changed release would call it; None stays None."""
    if processor is None:
        return None
    return lambda **hook: processor(**change(hook))


class _ChangedHook(GPTModel):
    """A future in which the hook's keywords are not those of today."""

    @staticmethod
    def change(hook):
        raise NotImplementedError

    def _postprocess(self, *args, output_processor=None, **kwargs):
        return super()._postprocess(*args, output_processor=_changed(output_processor, self.change), **kwargs)


class SeventeenthKeyword(_ChangedHook):
    """The hook hands over one thing more, and it means something."""

    @staticmethod
    def change(hook):
        return hook | {"logit_dtype": torch.float32}


class RenamedKeyword(_ChangedHook):
    """``scale_logits`` is called ``logits_transform`` from now on."""

    @staticmethod
    def change(hook):
        return {("logits_transform" if name == "scale_logits" else name): value for name, value in hook.items()}


class KeywordGone(_ChangedHook):
    """``output_weight`` is not handed over any more: with tied weights nothing says what to multiply by."""

    @staticmethod
    def change(hook):
        return {name: value for name, value in hook.items() if name != "output_weight"}


class TransposedLabels(_ChangedHook):
    """Labels come sequence first, as the hidden states do."""

    @staticmethod
    def change(hook):
        return hook | {"labels": None if hook["labels"] is None else hook["labels"].transpose(0, 1).contiguous()}


class HookCalledTwice(GPTModel):
    """The processor is called a second time (for a metric, say) and the second result is returned."""

    def _postprocess(self, *args, output_processor=None, **kwargs):
        def twice(**hook):
            output_processor(**hook)
            return output_processor(**hook)

        return super()._postprocess(*args, output_processor=twice if output_processor is not None else None, **kwargs)


class HookBeforeMtp(GPTModel):
    """The processor is called before MTP has run: its result is right, and MTP learns nothing."""

    def _postprocess(self, *args, output_processor=None, **kwargs):
        if output_processor is None:
            return super()._postprocess(*args, **kwargs)
        depths, self.config.mtp_num_layers = self.config.mtp_num_layers, None
        kwargs["mtp_in_postprocess"] = False
        try:
            return super()._postprocess(*args, output_processor=output_processor, **kwargs)
        finally:
            self.config.mtp_num_layers = depths


class HookRemoved(GPTModel):
    """The hook is gone again."""

    def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, *, loss_mask=None):
        return super().forward(
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, labels=labels, loss_mask=loss_mask
        )


class RequiredParameter(GPTModel):
    """``forward`` cannot be called without something new."""

    def forward(self, input_ids, position_ids, attention_mask, *args, routing_plan, output_processor=None,
                output_processor_context=None, **kwargs):  # fmt: skip
        assert routing_plan == "plan"
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            *args,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
            **kwargs,
        )


class OutputLayerRenamed(GPTModel):
    """The head is called ``lm_head``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lm_head = self.output_layer
        del self.output_layer


class HeadThatCanComputeTheLoss(GPTModel):
    """The head is a subclass that upstream asks for the loss under one configuration, and for logits otherwise."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_layer.__class__ = LinearCrossEntropyModule


class _TouchedLogits(GPTModel):
    """A future in which logits are transformed on their way to the loss, by ``touch``."""

    def _scale_logits(self, logits):
        return self.touch(logits)


def touched_by(operation):
    """A future whose logits go through ``operation``."""
    return type("TouchedLogits", (_TouchedLogits,), {"touch": staticmethod(operation)})


class LossTransformsLogits(GPTModel):
    """Logits are capped inside the loss method, after everything that the head sees."""

    def compute_language_model_loss(self, labels, logits):
        return super().compute_language_model_loss(labels, 30 * torch.tanh(logits / 30))
