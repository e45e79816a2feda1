"""A head that changes after the model was patched: the result follows the model as it is, or the call is refused."""

import sys

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from support.models import Shape, batch_for, build
from support.subjects import patched
from test_refusals import LoraHead
from torch.utils._python_dispatch import TorchDispatchMode

import mcore_fused
from mcore_compat.testing.reference import log_probs_and_entropy, stock_forward
from mcore_fused.head.product import check_product
from mcore_fused.head.supported import check_fused_call

pytestmark = pytest.mark.needs("patch", "legacy", "refusal", "library")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
BATCH = batch_for(97, 2, 5)


def _capped(logits):
    return torch.tanh(logits / 3) * 3


def _adapter(model):
    model.output_layer = LoraHead(model.output_layer)


def _bias(model):
    model.output_layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, 97, dtype=torch.float64))


def _parameter(model):
    model.output_layer.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))


def _submodule(model):
    model.output_layer.add_module("lora_a", torch.nn.Linear(32, 1))


def _forward_hook(model):
    model.output_layer.register_forward_hook(lambda _layer, _args, output: (_capped(output[0]), output[1]))


def _backward_hook(model):
    model.output_layer.register_full_backward_hook(lambda *_: None)


def _backward_pre_hook(model):
    model.output_layer.register_full_backward_pre_hook(lambda _layer, gradients: (gradients[0].clamp(-0.01, 0.01),))


def _subclass(model):
    class SoftCapped(type(model.output_layer)):
        def forward(self, *args, **kwargs):
            logits, bias = super().forward(*args, **kwargs)
            return _capped(logits), bias

    model.output_layer.__class__ = SoftCapped


def _own_forward(model):
    stock = model.output_layer.forward
    model.output_layer.forward = lambda *args, **kwargs: (_capped(stock(*args, **kwargs)[0]), None)


def _config(model):
    model.config.final_logit_softcapping = 3.0


def _loss(model):
    stock = model.compute_language_model_loss
    model.compute_language_model_loss = lambda labels, logits: stock(labels, _capped(logits))


CHANGES = {
    "adapter": _adapter, "bias": _bias, "parameter": _parameter, "submodule": _submodule,
    "forward hook": _forward_hook, "backward hook": _backward_hook, "backward pre-hook": _backward_pre_hook,
    "subclass": _subclass, "own forward": _own_forward, "config": _config, "loss": _loss,
}  # fmt: skip


def _refused(call):
    with pytest.raises(mcore_fused.McoreFusedError) as caught:
        call()
    assert caught.value.next_step


@MODES
@pytest.mark.parametrize("change", CHANGES)
def test_a_head_that_changes_after_patching(subject, mode, change):
    """Patching again refuses all of these; a call in between must not compute without them."""
    model = build(Shape())
    with patched(subject, model, mode):
        subject.call(model, *BATCH.inputs, labels=BATCH.labels)
        CHANGES[change](model)
        before = dict(vars(model.output_layer))
        _refused(lambda: subject.call(model, *BATCH.inputs, labels=BATCH.labels))
        assert dict(vars(model.output_layer)) == before


@pytest.mark.since("upstream_hook")
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_never_patched(change):
    """The processor handed to Megatron directly checks what patching checks."""
    model = build(Shape())
    CHANGES[change](model)
    _refused(lambda: model(*BATCH.inputs, labels=BATCH.labels, output_processor=mcore_fused.fused_output_processor))


@MODES
@pytest.mark.parametrize("when", ["before patching", "after patching"])
def test_an_option_of_the_layer_that_caps_its_logits(subject, mode, when, monkeypatch):
    """The class is stock by name, and what it computes depends on an option that nobody has heard of."""
    stock = ColumnParallelLinear.forward

    def optional_cap(self, *args, **kwargs):
        logits, bias = stock(self, *args, **kwargs)
        cap = getattr(self, "logit_cap", None)
        return (logits if cap is None else torch.tanh(logits / cap) * cap), bias

    with monkeypatch.context() as patch:
        patch.setattr(ColumnParallelLinear, "forward", optional_cap)
        model = build(Shape())
        if when == "before patching":
            model.output_layer.logit_cap = 30.0
            _refused(lambda: subject.patch(model, mode))
            return
        with patched(subject, model, mode):
            output = subject.call(model, *BATCH.inputs, labels=BATCH.labels)
            model.output_layer.logit_cap = 30.0
            _refused(lambda: subject.call(model, *BATCH.inputs, labels=BATCH.labels))
            del model.output_layer.logit_cap
            again = subject.call(model, *BATCH.inputs, labels=BATCH.labels)
    assert torch.equal(output.log_probs, again.log_probs)


@MODES
def test_another_plain_head_after_patching_is_followed(subject, mode):
    """The vocabulary was resized, say: the result is that of the new head."""
    model = build(Shape())
    with torch.no_grad(), patched(subject, model, mode):
        subject.call(model, *BATCH.inputs, labels=BATCH.labels)
        model.output_layer = build(Shape(seed=4)).output_layer
        output = subject.call(model, *BATCH.inputs, labels=BATCH.labels)
        logits = model(*BATCH.inputs)
    expected, _ = log_probs_and_entropy(logits, BATCH.labels)
    assert torch.allclose(output.log_probs, expected, atol=1e-10)


def test_the_check_of_a_call_is_cheap_and_reads_no_device():
    """No tensor operation, hence no synchronisation, and so few steps that they take some 10 microseconds.

    Steps are counted because time on a shared host says little; 150 calls of functions are below 20 microseconds.
    """
    model = build(Shape())
    layer, like, loss = model.output_layer, torch.zeros(1, dtype=torch.float64), model.compute_language_model_loss
    check_product(layer, like)
    steps, operations = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        sys.setprofile(lambda _frame, event, _what: steps.append(event) if event.endswith("call") else None)
        try:
            check_fused_call(layer, layer.config, loss)
            check_product(layer, like)
        finally:
            sys.setprofile(None)
    assert not operations
    assert 10 < len(steps) < 150


def _early_exit():
    from support.models import model_class

    class EarlyExit(model_class()):
        def forward(self, *args, labels=None, **kwargs):
            self.early_labels = labels
            handle = self.decoder.register_forward_hook(self.supervise)
            try:
                return super().forward(*args, labels=labels, **kwargs)
            finally:
                handle.remove()

        def supervise(self, _decoder, _inputs, hidden):
            if self.early_labels is not None:
                early, _ = self.output_layer(hidden * 0.5)
                self.early_loss = self.compute_language_model_loss(self.early_labels, early)

    return build(Shape(), cls=EarlyExit)


def test_a_head_asked_twice_for_the_same_labels(subject):
    """The second answer must not be the first one's: an error in legacy mode."""
    model = _early_exit()
    twice = pytest.raises(mcore_fused.McoreFusedError, match="twice for the loss of the same labels")
    with torch.no_grad(), patched(subject, model, "legacy"), twice:
        subject.call(model, *BATCH.inputs, labels=BATCH.labels)


@pytest.mark.since("upstream_hook")
def test_a_head_asked_before_the_hook(subject):
    """In hook mode the early loss is stock's, and the result that of the last layer."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    class EarlyExit(GPTModel):
        def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
            if labels is not None:
                early, _ = self.output_layer(hidden_states * 0.5)
                self.early_loss = self.compute_language_model_loss(labels, early)
            return super()._postprocess(hidden_states, *args, labels=labels, **kwargs)

    model = build(Shape(), cls=EarlyExit)
    with torch.no_grad(), patched(subject, model, "hook"):
        output = subject.call(model, *BATCH.inputs, labels=BATCH.labels)
        stock = stock_forward(build(Shape()), *BATCH.inputs, labels=BATCH.labels)
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)


@MODES
def test_an_argument_of_the_model_called_temperature(subject, mode):
    """The shorthand of legacy mode does not take a model's own argument away."""
    from support.models import model_class

    class OwnTemperature(model_class()):
        def forward(self, *args, temperature=None, **kwargs):
            self.given = temperature
            return super().forward(*args, **kwargs)

    model = build(Shape(), cls=OwnTemperature)
    with torch.no_grad(), patched(subject, model, mode):
        model(*BATCH.inputs, temperature=0.5)
        assert model.given == 0.5
        output = subject.call(model, *BATCH.inputs, labels=BATCH.labels)
        assert model.given is None
    assert isinstance(output, mcore_fused.FusedForwardOutput)
