"""Backports: an older release whose GPTModel has the hook's signature, as vendors and forks ship it.

``MCORE_COMPAT_BACKPORT`` chooses: ``honest`` calls the processor where megatron-core 0.18 calls it, ``dishonest``
accepts it and never calls it. Written for the 0.16 and 0.17 split into ``_preprocess`` and ``_postprocess``.
"""

import contextlib
import inspect
import os

from megatron.core.models.gpt.gpt_model import GPTModel

HOOK = ("output_processor", "output_processor_context")


def _with_hook(name):
    """A method's own signature with the hook's two keywords at its end, as a backport would write it."""
    stock = getattr(GPTModel, name, None)
    if stock is None:
        return None
    parameters = inspect.signature(stock).parameters
    hook = [inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY, default=None) for word in HOOK]
    return inspect.Signature([*parameters.values(), *(word for word in hook if word.name not in parameters)])


class HonestBackport(GPTModel):
    """Calls the processor after MTP and before the head, with the sixteen keywords of 0.18."""

    _hook = None

    @contextlib.contextmanager
    def _hooked(self, hook):
        before, self._hook = self._hook, hook
        try:
            yield
        finally:
            if before is None:
                del self._hook
            else:
                self._hook = before

    def forward(self, *args, output_processor=None, output_processor_context=None, **kwargs):
        if output_processor is None and self._hook is None:
            return super().forward(*args, **kwargs)
        with self._hooked((output_processor, output_processor_context)):
            return super().forward(*args, **kwargs)

    def build_schedule_plan(self, *args, output_processor=None, output_processor_context=None, **kwargs):
        plan = super().build_schedule_plan(*args, **kwargs)
        if output_processor is not None:
            run = plan.post_process.forward_func

            def hooked_run(*inputs):
                with self._hooked((output_processor, output_processor_context)):
                    return run(*inputs)

            plan.post_process.forward_func = hooked_run
        return plan

    forward.__signature__ = _with_hook("forward")
    build_schedule_plan.__signature__ = _with_hook("build_schedule_plan")

    def _postprocess(self, hidden_states, **kwargs):
        processor, context = self._hook or (None, None)
        if processor is None or not self.post_process:
            return super()._postprocess(hidden_states, **kwargs)
        self.post_process = False
        try:
            hidden_states = super()._postprocess(hidden_states, **kwargs)
        finally:
            self.post_process = True
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_num_layers:
            from megatron.core.transformer.multi_token_prediction import process_mtp_loss

            hidden_states = process_mtp_loss(
                hidden_states=hidden_states,
                labels=kwargs.get("labels"),
                loss_mask=kwargs.get("loss_mask"),
                output_layer=self.output_layer,
                output_weight=weight,
                runtime_gather_output=kwargs.get("runtime_gather_output"),
                is_training=self.training,
                compute_language_model_loss=self.compute_language_model_loss,
                config=self.config,
                cp_group=self.pg_collection.cp,
                packed_seq_params=kwargs.get("packed_seq_params"),
                scale_logits_fn=self._scale_logits if self.config.use_mup else None,
            )
        handed_on = (
            "labels loss_mask input_ids position_ids attention_mask decoder_input inference_context "
            "packed_seq_params runtime_gather_output"
        )
        return processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=weight,
            context=context,
            compute_language_model_loss=self.compute_language_model_loss,
            scale_logits=self._scale_logits,
            config=self.config,
            **{name: kwargs.get(name) for name in handed_on.split()},
        )


class DishonestBackport(GPTModel):
    """Accepts the processor and returns the stock loss (verl#7826: a replaced ``_postprocess`` did this)."""

    def forward(self, *args, output_processor=None, output_processor_context=None, **kwargs):
        return super().forward(*args, **kwargs)

    forward.__signature__ = _with_hook("forward")


def model_class() -> type[GPTModel]:
    """The GPTModel of this cell: the release's own, or the backport that the cell asks for."""
    asked = os.environ.get("MCORE_COMPAT_BACKPORT", "")
    classes = {"": GPTModel, "honest": HonestBackport, "dishonest": DishonestBackport}
    if asked not in classes:
        raise ValueError(f"MCORE_COMPAT_BACKPORT={asked!r}; allowed: honest, dishonest, or unset")
    return classes[asked]
