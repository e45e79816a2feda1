"""Evidence, re-entrancy, threads, config logger, frozen parts: defined, and tested."""

import gc
import threading
import weakref

import pytest
import torch
from support.models import Shape, batch_for, build
from support.subjects import patched

from mcore_compat.testing.reference import gradients, stock_forward

pytestmark = pytest.mark.needs("patch")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


@pytest.mark.needs("evidence", "mode")
@MODES
def test_every_fused_call_leaves_evidence(subject, mode):
    """P7: proof of execution, not of installation; one call, one count, on the path that was installed."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    with torch.no_grad(), patched(subject, model, mode):
        counter = "hook_calls" if subject.mode(model) == "hook" else "deferred_head_calls"
        before = subject.evidence()
        subject.call(model, *batch.inputs, labels=batch.labels)
        after = subject.evidence()
        model(*batch.inputs)
        unchanged = subject.evidence()
    assert {name for name in after if after[name] != before[name]} == {counter, "kernel_launches"}
    assert after[counter] == before[counter] + 1
    assert unchanged == after


@pytest.mark.needs("evidence", "refusal")
@MODES
def test_a_call_that_bypasses_the_head_is_an_error(subject, mode):
    """P3, P7, P11: fusion asked for and not run is never a silent fallback."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    with torch.no_grad(), patched(subject, model, mode):
        kind = type(model)
        bypass = type("Bypass", (kind,), {"forward": lambda self, *args, **kwargs: torch.zeros(2, 4)})
        model.__class__ = bypass
        with pytest.raises(Exception, match="Next step"):
            subject.call(model, *batch.inputs, labels=batch.labels)
        model.__class__ = kind


@pytest.mark.needs("thread_safety")
@MODES
def test_a_forward_inside_a_forward(subject, mode):
    """Re-entrancy: a stock and a fused forward of the same model, run from inside its fused forward."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    with torch.no_grad():
        logits = model(*batch.inputs)
        with patched(subject, model, mode):
            plain = subject.call(model, *batch.inputs, labels=batch.labels)
            inner = {}

            def nested(*_):
                if not inner:
                    inner["busy"] = True
                    inner["logits"] = model(*batch.inputs)
                    inner["fused"] = subject.call(model, *batch.inputs, labels=batch.labels)

            handle = model.decoder.register_forward_hook(nested)
            outer = subject.call(model, *batch.inputs, labels=batch.labels)
            handle.remove()
    assert torch.equal(inner["logits"], logits)
    assert torch.equal(inner["fused"].log_probs, plain.log_probs)
    assert torch.equal(outer.log_probs, plain.log_probs)


@pytest.mark.needs("thread_safety")
@MODES
def test_threads(subject, mode):
    """Two threads on one model: each gets its own labels' log-probs, and nothing is left installed."""
    model, batches = build(Shape()), [batch_for(97, 2, 4, seed) for seed in range(4)]
    before, found, errors = dict(vars(model)), {}, []

    def work(index):
        try:
            for _ in range(5):
                with torch.no_grad():
                    found[index] = subject.call(model, *batches[index].inputs, labels=batches[index].labels)
        except Exception as error:  # noqa: BLE001 - the main thread judges it
            errors.append(error)

    with torch.no_grad(), patched(subject, model, mode):
        expected = [subject.call(model, *batch.inputs, labels=batch.labels) for batch in batches]
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    for index, output in found.items():
        assert torch.equal(output.log_probs, expected[index].log_probs)
    assert dict(vars(model)) == before


@MODES
@pytest.mark.parametrize("frozen", ["head", "body"])
def test_frozen_parts(subject, mode, frozen):
    model, batch = build(Shape()), batch_for(97, 2, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("output_layer") == (frozen == "body"))
    stock_forward(model, *batch.inputs, labels=batch.labels).log_probs.sum().backward()
    expected = gradients(model)
    with patched(subject, model, mode):
        subject.call(model, *batch.inputs, labels=batch.labels).log_probs.sum().backward()
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, atol=1e-9 * gradient.norm().item()), name


@pytest.mark.needs("config_logger")
@MODES
def test_config_logger_payload(subject, mode, tmp_path):
    """The config logger keeps its file and its keys; fused outputs stand in for the logits."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    model.config.config_logger_dir = str(tmp_path)
    with torch.no_grad(), patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels)
    (file,) = tmp_path.glob("input_and_logits.*.pth")
    payload = torch.load(file, weights_only=False)
    assert list(payload) == ["input_ids", "position_ids", "attention_mask", "decoder_input", "logits"]
    assert torch.equal(payload["logits"]["log_probs"], output.log_probs)
    assert torch.equal(payload["logits"]["entropy"], output.entropy)
    assert not payload["logits"]["log_probs"].requires_grad


@pytest.mark.parametrize("how", ["eval", "train"])
@MODES
def test_training_flag_does_not_matter_without_dropout(subject, mode, how):
    model, batch = build(Shape()), batch_for(97, 2, 4)
    getattr(model, how)()
    with torch.no_grad():
        stock = stock_forward(model, *batch.inputs, labels=batch.labels)
        with patched(subject, model, mode):
            fused = subject.call(model, *batch.inputs, labels=batch.labels)
    assert torch.allclose(fused.log_probs, stock.log_probs, atol=1e-10)


@MODES
def test_callers_arguments_are_not_mutated(subject, mode):
    """FACTS of the field: a replaced forward added keys to the caller's extra_block_kwargs."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    extra: dict = {}
    labels = batch.labels.clone()
    with torch.no_grad(), patched(subject, model, mode):
        subject.call(model, *batch.inputs, labels=batch.labels, extra_block_kwargs=extra)
    assert extra == {}
    assert torch.equal(labels, batch.labels)


@pytest.mark.needs("library")
@MODES
def test_nothing_keeps_a_model_alive(subject, mode):
    """Evidence, locks, modes and signatures are remembered for as long as the model exists."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    alive = [weakref.ref(model), weakref.ref(model.output_layer)]
    with torch.no_grad(), patched(subject, model, mode):
        subject.call(model, *batch.inputs, labels=batch.labels)
    subject.mode(model)
    del model
    gc.collect()
    assert [each() for each in alive] == [None, None]
