"""Calls that a framework makes itself: keywords on the patched forward, evidence, logs."""

import pytest
import torch
from support.copies import deep_copy, through_pickle
from support.models import Shape, batch_for, build, shared
from support.models.packed import Rows, rows_alone
from support.subjects import patched
from test_patch_machine import VisionLanguageModel

import mcore_fused
from mcore_compat.testing.reference import gradients, stock_forward
from mcore_fused import FusedForwardOutput, FusedOutputProcessorContext, fused_output_processor

pytestmark = pytest.mark.needs("patch", "legacy", "library")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_temperature_shorthand(subject, temperature):
    """The patched forward takes ``temperature=`` itself (verl#3133: it was taken and ignored)."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad():
        stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=temperature)
        with patched(subject, model, "legacy"):
            output = model(*batch.inputs, labels=batch.labels, temperature=temperature)
    assert isinstance(output, FusedForwardOutput)
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)


def test_temperature_and_processor_contradict(subject):
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with patched(subject, model, "legacy"), pytest.raises(TypeError, match="temperature"):
        model(*batch.inputs, labels=batch.labels, temperature=1.0, output_processor=fused_output_processor)


@MODES
def test_processor_on_the_forward(subject, mode):
    """Hook and legacy take the same keywords (P7), with a context or without."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    asking = {"output_processor": fused_output_processor}
    with torch.no_grad(), patched(subject, model, mode):
        expected = subject.call(model, *batch.inputs, labels=batch.labels)
        plain = model(*batch.inputs, labels=batch.labels, output_processor_context=None, **asking)
        context = FusedOutputProcessorContext(temperature=0.5)
        before = mcore_fused.fused_forward_evidence(model)
        warm = model(*batch.inputs, labels=batch.labels, output_processor_context=context, **asking)
        after = mcore_fused.fused_forward_evidence(model)
        stock = stock_forward(build(Shape()), *batch.inputs, labels=batch.labels, temperature=0.5)
    assert torch.equal(plain.log_probs, expected.log_probs)
    assert torch.allclose(warm.log_probs, stock.log_probs, atol=1e-10)
    hook = mode == "auto" and subject.mode(model) == "hook"
    assert after.hook_calls - before.hook_calls == int(hook)
    assert after.deferred_head_calls - before.deferred_head_calls == int(not hook)
    assert context == FusedOutputProcessorContext(temperature=0.5)


@MODES
def test_processor_without_labels_returns_stock_logits(subject, mode):
    """P9, verl#7499: the same code serves evaluation; asking for fusion without labels is counted, not an error."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad():
        expected = model(*batch.inputs)
        with patched(subject, model, mode):
            before = mcore_fused.fused_forward_evidence(model)
            logits = model(
                *batch.inputs,
                labels=None,
                output_processor=fused_output_processor,
                output_processor_context=FusedOutputProcessorContext(),
            )
            after = mcore_fused.fused_forward_evidence(model)
    assert torch.equal(logits, expected)
    assert after.unfused_fallbacks == before.unfused_fallbacks + 1
    assert after.kernel_launches == before.kernel_launches


@MODES
@pytest.mark.parametrize("context", [{"temperature": 1.0}, 1.0])
def test_contexts_of_another_kind(subject, mode, context):
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, model, mode), pytest.raises(TypeError, match="output_processor_context"):
        model(
            *batch.inputs,
            labels=batch.labels,
            output_processor=fused_output_processor,
            output_processor_context=context,
        )


@pytest.mark.needs("evidence")
@MODES
def test_one_call_is_one_kernel_launch(subject, mode):
    """Evidence counts what ran: not installing, and not a call that failed before the head."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, model, mode):
        for calls in (1, 2):
            subject.call(model, *batch.inputs, labels=batch.labels)
            seen = mcore_fused.fused_forward_evidence(model)
            assert seen.kernel_launches == seen.hook_calls + seen.deferred_head_calls == calls
        with pytest.raises(ValueError, match="shape"):
            subject.call(model, *batch.inputs, labels=batch.labels[:, 1:])
        assert mcore_fused.fused_forward_evidence(model) == seen


@MODES
def test_single_tensor_for_the_schedule_plan(subject, mode):
    """The 1F1B plan carries one tensor between its nodes, so the context can ask for log-probs and entropy as one."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, model, mode):
        whole = subject.call(model, *batch.inputs, labels=batch.labels)
        context = FusedOutputProcessorContext(single_tensor=True)
        stacked = mcore_fused.call_fused_forward(model, *batch.inputs, labels=batch.labels, context=context)
    assert torch.equal(stacked, torch.stack((whole.log_probs, whole.entropy)))


@MODES
def test_hidden_states_only_when_asked_for(subject, mode):
    """Holding them keeps an activation alive; they are what the head multiplied."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, model, mode):
        assert subject.call(model, *batch.inputs, labels=batch.labels).hidden_states is None
        context = FusedOutputProcessorContext(return_hidden_states=True)
        output = mcore_fused.call_fused_forward(model, *batch.inputs, labels=batch.labels, context=context)
    logits = output.hidden_states @ model.output_layer.weight.T
    expected = torch.log_softmax(logits.transpose(0, 1), -1).gather(-1, batch.labels[..., None])[..., 0]
    assert torch.allclose(output.log_probs, expected, atol=1e-10)


@MODES
def test_config_logger_payload_holds_no_graph(subject, mode, tmp_path):
    model, batch = build(Shape()), batch_for(97, 2, 4)
    model.config.config_logger_dir = str(tmp_path)
    with patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels)
    (file,) = tmp_path.glob("input_and_logits.*.pth")
    payload = torch.load(file, weights_only=False)["logits"]
    assert output.log_probs.requires_grad
    assert not payload["log_probs"].requires_grad
    assert not payload["entropy"].requires_grad


@pytest.mark.since("mtp")
@MODES
def test_mtp_loss_is_that_of_temperature_one(subject, mode):
    """A rollout's temperature belongs to the log-probs asked for; MTP trains at 1, as stock does."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def of_mtp(found):
        return {name: gradient for name, gradient in found.items() if name.startswith("mtp.")}

    batch = batch_for(97, 2, 7)
    extra = {"labels": batch.labels, "loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)}
    results = []
    for temperature in (1.0, 0.3):
        MTPLossLoggingHelper.tracker.clear()
        model = build(Shape(mtp=1))
        model.train()
        with patched(subject, model, mode):
            # Nothing flows through the main head, so that all that reaches MTP is its own loss.
            (subject.call(model, *batch.inputs, temperature=temperature, **extra).log_probs * 0).sum().backward()
        results.append(of_mtp(gradients(model)))
    assert any(gradient.any() for gradient in results[0].values())
    for name, gradient in results[0].items():
        assert torch.allclose(results[1][name], gradient, rtol=1e-12, atol=0), name


@MODES
@pytest.mark.parametrize("how", [deep_copy, through_pickle])
def test_copies_compute_with_their_own_weights(subject, mode, how):
    """A copy of a patched model is patched around itself; taking the original's patch away changes nothing for it."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad():
        with patched(subject, model, mode):
            twin = how(model)
            twin.output_layer.weight.neg_()
            original = subject.call(model, *batch.inputs, labels=batch.labels)
        subject.patch(twin, mode)
        output = subject.call(twin, *batch.inputs, labels=batch.labels)
        subject.unpatch(twin)
        stock = stock_forward(twin, *batch.inputs, labels=batch.labels)
    assert (output.log_probs - original.log_probs).abs().max() > 0.1
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)
    assert "forward" not in vars(twin)


@pytest.mark.needs("factories", "float64")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lengths", [(3, 2), (1, 4, 0), (5,)])
def test_jagged_rows_equal_rows_alone(fused, lengths):
    """L1, M7: against each row run by itself; fused and unfused share the shift, so their agreement proves nothing."""
    from mcore_fused.frameworks.forward import forward_no_padding_gen, fused_forward_no_padding_gen

    model, rows = shared(Shape(packed=True)), Rows.of(97, lengths)
    forward = (fused_forward_no_padding_gen if fused else forward_no_padding_gen)()
    with torch.no_grad():
        output = forward(model, rows.nested, rows.nested, None, 0.7, True, 0)
        alone = rows_alone(model, rows, [0.7] * len(lengths))
    for part, name in enumerate(("log_probs", "entropy")):
        expected = torch.cat([row[part] for row in alone])
        assert torch.allclose(output[name].values(), expected, atol=1e-9)


@MODES
def test_positional_arguments_before_the_labels_are_not_labels(subject, mode):
    """Four of them are decoder_input and what comes before; the fifth, None, is no label either."""
    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad():
        expected = model(*batch.inputs)
        with patched(subject, model, mode):
            for arguments in ((*batch.inputs, None), (*batch.inputs, None, None)):
                assert torch.equal(mcore_fused.call_fused_forward(model, *arguments), expected)


@MODES
def test_an_outer_model_that_asks_by_itself_is_refused(subject, mode):
    """Two askers with two contexts would leave one of them without its evidence."""

    class Asking(VisionLanguageModel):
        def forward(self, *inputs, labels=None):
            return self.language_model(*inputs, labels=labels, output_processor=fused_output_processor)

    model, batch = build(Shape()), batch_for(97, 2, 5)
    with torch.no_grad(), patched(subject, outer := Asking(model), mode):
        with pytest.raises(TypeError, match="output_processor"):
            subject.call(outer, *batch.inputs, labels=batch.labels)
        assert isinstance(outer(*batch.inputs, labels=batch.labels), FusedForwardOutput)
