"""Mode detection: judged by what a model does, not by its version and not by its signature alone."""

import functools

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from support.models import Shape, batch_for, build, half_chain, shared
from support.models.backport import model_class
from support.subjects import patched

pytestmark = pytest.mark.needs("mode")

SHAPE = Shape()


def _expected_mode():
    """What the cell's model really does with a processor: called or not. Independent of the subject."""
    model, batch, seen = build(SHAPE), batch_for(97, 1, 4), []

    def processor(**hook):
        seen.append(hook)
        return hook["hidden_states"]

    try:
        model(*batch.inputs, labels=batch.labels, output_processor=processor, output_processor_context=None)
    except TypeError:
        return "legacy"
    return "hook" if seen else "legacy"


def test_mode_is_what_the_model_does(subject):
    assert subject.mode(build(SHAPE)) == _expected_mode()


@pytest.mark.parametrize("wrap", [half_chain, lambda model: Float16Module(model.config, model)])
def test_mode_is_found_through_wrappers(subject, wrap):
    """A1: asked about a wrapper, whose signature never shows the hook."""
    model = build(Shape(dtype=torch.bfloat16))
    assert subject.mode(wrap(model)) == subject.mode(model) == _expected_mode()


@pytest.mark.parametrize("tied", [False, True])
def test_mode_probe_leaves_the_model_alone(subject, tied):
    model, called = build(Shape(tied=tied)), []
    for module in (model.decoder, model.output_layer, model):
        module.register_forward_hook(lambda *_: called.append(1))
        module.register_forward_pre_hook(lambda *_: called.append(1))
    model.output_layer._forward_hooks.clear()  # a forward hook on the head is refused
    before = [dict(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    subject.mode(model)
    assert all(now == dict(vars(module)) for now, module in zip(before, model.modules(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not called
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.needs("mtp")
@pytest.mark.since("mtp")
def test_mode_with_mtp(subject):
    assert subject.mode(build(Shape(mtp=1))) == _expected_mode()


class _SwallowingForward(model_class()):
    """P1, A3: a subclass that takes any keyword and drops the hook's."""

    def forward(self, *args, **kwargs):
        kwargs.pop("output_processor", None)
        kwargs.pop("output_processor_context", None)
        return super().forward(*args, **kwargs)


class _PromisingForward(model_class()):
    """A2, P7, verl#7826: the signature promises the hook, the body never calls it."""

    def forward(self, input_ids, position_ids, attention_mask, *args, output_processor=None,
                output_processor_context=None, **kwargs):  # fmt: skip
        return super().forward(input_ids, position_ids, attention_mask, *args, **kwargs)


class _DecoratedForward(model_class()):
    """A5, P6: functools.wraps shows the wrapped signature; the wrapper's body drops the hook."""

    @functools.wraps(_PromisingForward.forward)
    def forward(self, *args, **kwargs):
        kwargs.pop("output_processor", None)
        kwargs.pop("output_processor_context", None)
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("cls", [_SwallowingForward, _PromisingForward, _DecoratedForward])
def test_mode_of_a_subclass_that_drops_the_hook_is_legacy(subject, cls):
    model, batch = build(SHAPE, cls=cls), batch_for(97, 2, 5)
    assert subject.mode(model) == "legacy"
    with patched(subject, model):
        fused = subject.call(model, *batch.inputs, labels=batch.labels)
    with patched(subject, plain := build(SHAPE)):
        expected = subject.call(plain, *batch.inputs, labels=batch.labels)
    assert torch.equal(fused.log_probs, expected.log_probs)


@pytest.mark.since("hook")
def test_mode_of_a_replaced_postprocess_is_legacy(subject, monkeypatch):
    """P7, verl#7826: a class-wide ``_postprocess`` replacement accepts the hook's arguments and ignores them."""
    cls = model_class()
    if not hasattr(cls, "_postprocess"):
        pytest.fail("a model with the hook has no _postprocess")
    stock = cls._postprocess

    def replacement(self, *args, **kwargs):
        kwargs.pop("output_processor", None)
        kwargs.pop("output_processor_context", None)
        return stock(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cls, "_postprocess", replacement)
        if "output_processor" not in model_class().__dict__.get("forward", cls.forward).__code__.co_varnames:
            pytest.fail("the hook left the forward's parameters")
        model = build(SHAPE)
        if cls.__module__.startswith("megatron"):
            assert subject.mode(model) == "legacy"
        with patched(subject, model):
            subject.call(model, *batch_for(97, 1, 4).inputs, labels=batch_for(97, 1, 4).labels)


@pytest.mark.needs("legacy")
def test_forced_hook_needs_a_hook(subject):
    model = build(SHAPE)
    if _expected_mode() == "hook":
        with patched(subject, model, "hook"):
            assert subject.mode(model) == "hook"
    elif "output_processor" not in type(model).forward.__code__.co_varnames:
        with pytest.raises(Exception, match="output_processor"):
            subject.patch(model, "hook")


def test_mode_is_remembered(subject):
    model = shared(SHAPE)
    assert subject.mode(model) == subject.mode(model)
