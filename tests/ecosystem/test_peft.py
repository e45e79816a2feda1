"""Adapters of the real ``peft`` on the real GPTModel: off the head fused equals unfused, on the head it is refused.

float64 sums over H = 32 and V = 97 in another order, some hundred unit roundoffs of 1.1e-16 and values below 20: 1e-10.
"""

import copy

import peft
import pytest
import torch
from lora import ATTENTION_AND_MLP, lora_config
from megatron.core.transformer.module import Float16Module
from support.copies import groups_by_reference
from support.models import Shape, batch_for, build
from support.models.packed import Rows
from support.subjects import patched

from mcore_compat.testing.reference import stock_forward

pytestmark = pytest.mark.needs("call", "patch", "legacy", "refusal", "float64")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
CLOSE = 1e-10


def _injected(model, config):
    return peft.inject_adapter_in_model(config, model).to(torch.float64)


def _wrapped(model, config):
    return peft.get_peft_model(model, config).to(torch.float64)


HELD = pytest.mark.parametrize("hold", [_injected, _wrapped], ids=["injected", "PeftModel"])


def _adapter_gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    assert found
    assert all("lora_" in name for name in found), "a frozen parameter got a gradient"
    assert all(gradient.any() for gradient in found.values())
    return found


def _assert_equal_to_unfused(subject, held, model, batch, mode):
    stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    (stock.log_probs.sum() + 0.5 * stock.entropy.sum()).backward()
    expected = _adapter_gradients(held)
    before = dict(vars(held)), dict(vars(model))
    with patched(subject, held, mode):
        fused = subject.call(held, *batch.inputs, labels=batch.labels, temperature=0.7)
    assert (dict(vars(held)), dict(vars(model))) == before
    (fused.log_probs.sum() + 0.5 * fused.entropy.sum()).backward()
    assert (fused.log_probs - stock.log_probs).abs().max() <= CLOSE
    assert (fused.entropy - stock.entropy).abs().max() <= CLOSE
    actual = _adapter_gradients(held)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= CLOSE * max(1.0, gradient.norm().item()), name


@MODES
@HELD
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_off_the_head(subject, hold, mode, tied):
    """P5: attention and MLP adapters; outputs and every adapter's gradient are those of the unfused model."""
    model = build(Shape(tied=tied))
    held = hold(model, lora_config(*ATTENTION_AND_MLP))
    before = subject.evidence()["kernel_launches"]
    _assert_equal_to_unfused(subject, held, model, batch_for(97, 2, 6), mode)
    assert subject.evidence()["kernel_launches"] == before + 1


@MODES
def test_the_reference_policy_is_the_model_with_its_adapters_off(subject, mode):
    """Frameworks get reference log-probs from the same model under ``disable_adapter()``; nothing is remembered."""
    batch = batch_for(97, 2, 6)
    with torch.no_grad():
        expected = stock_forward(build(Shape()), *batch.inputs, labels=batch.labels).log_probs
    held = _wrapped(build(Shape()), lora_config(*ATTENTION_AND_MLP))
    with torch.no_grad(), patched(subject, held, mode):
        adapted = subject.call(held, *batch.inputs, labels=batch.labels).log_probs
        with held.disable_adapter():
            reference = subject.call(held, *batch.inputs, labels=batch.labels).log_probs
        again = subject.call(held, *batch.inputs, labels=batch.labels).log_probs
    assert (reference - expected).abs().max() <= CLOSE
    assert (adapted - expected).abs().max() > 1e-3
    assert torch.equal(again, adapted)


@pytest.mark.needs("factories")
@MODES
@HELD
def test_adapters_in_the_forward_functions(hold, mode):
    """L1, P5: the framework's jagged forward on adapters; fused equals unfused, gradients too."""
    from mcore_fused.frameworks.forward import forward_no_padding_gen, fused_forward_no_padding_gen

    held, nested = hold(build(Shape(packed=True)), lora_config(*ATTENTION_AND_MLP)), Rows.of(97, (5, 1, 4), 3).nested
    results, learned = [], []
    for forward in (fused_forward_no_padding_gen(mode=mode), forward_no_padding_gen()):
        output = forward(held, nested, nested, {}, 0.7, True, 0)
        results.append((output["log_probs"].values(), output["entropy"].values()))
        (results[-1][0].sum() + 0.5 * results[-1][1].sum()).backward()
        learned.append(_adapter_gradients(held))
    for fused, unfused in zip(*results, strict=True):
        assert (fused - unfused).abs().max() <= CLOSE
    assert learned[0].keys() == learned[1].keys()
    for name, gradient in learned[1].items():
        assert (learned[0][name] - gradient).norm() <= CLOSE * max(1.0, gradient.norm().item()), name


@MODES
def test_adapters_under_float16_module(subject, mode):
    """The chain of bf16 training around a PeftModel: fp32 comes out, and the adapters learn."""
    model, batch = build(Shape(dtype=torch.bfloat16)), batch_for(97, 2, 6)
    config = model.config
    held = Float16Module(config, peft.get_peft_model(model, lora_config(*ATTENTION_AND_MLP)))
    with patched(subject, held, mode):
        output = subject.call(held, *batch.inputs, labels=batch.labels)
    assert output.log_probs.dtype is output.entropy.dtype is torch.float32
    output.log_probs.sum().backward()
    _adapter_gradients(held)


@MODES
@HELD
@pytest.mark.parametrize("targets", [("output_layer",), (*ATTENTION_AND_MLP, "output_layer")])
def test_adapters_on_the_head_are_refused(subject, hold, mode, targets):
    """P5, trl#4612: the fused product would miss them; the refusal says what and where, and changes nothing."""
    from mcore_fused.errors import UnsupportedOutputLayerError

    model = build(Shape())
    held = hold(model, lora_config(*targets))
    before = dict(vars(model))
    with pytest.raises(UnsupportedOutputLayerError, match=r"LoraOnMegatronLinear.*megatron-core.*Next step:"):
        subject.patch(held, mode)
    assert vars(model) == before


@HELD
@MODES
def test_adapters_put_on_the_head_after_patching_are_refused(subject, hold, mode):
    """The call is refused as patching would have been: the adapter is named, and nothing else is met first."""
    from mcore_fused.errors import UnsupportedOutputLayerError

    model, batch = build(Shape()), batch_for(97, 2, 5)
    subject.patch(model, mode)
    held = hold(model, lora_config("output_layer"))
    with pytest.raises(UnsupportedOutputLayerError, match=r"LoraOnMegatronLinear.*megatron-core.*Next step:"):
        subject.call(held, *batch.inputs, labels=batch.labels)
    subject.unpatch(held)


@MODES
def test_a_merged_head_is_supported(subject, mode):
    """``merge_and_unload`` puts the adapter into the head's weight, and the plain layer back."""
    model, batch = build(Shape()), batch_for(97, 2, 6)
    held = _wrapped(model, lora_config("output_layer"))
    with torch.no_grad():
        expected = stock_forward(model, *batch.inputs, labels=batch.labels).log_probs
        merged = held.merge_and_unload()
        with patched(subject, merged, mode):
            fused = subject.call(merged, *batch.inputs, labels=batch.labels).log_probs
    assert (fused - expected).abs().max() <= CLOSE


@MODES
def test_a_head_that_is_trained_whole_is_refused(subject, mode):
    """``modules_to_save``: peft puts a trained copy of the head beside the frozen one and chooses in its forward."""
    from mcore_fused.errors import UnsupportedOutputLayerError

    with groups_by_reference():
        held = _wrapped(build(Shape()), lora_config("linear_fc2", modules_to_save=["output_layer"]))
    with pytest.raises(UnsupportedOutputLayerError, match=r"ModulesToSaveWrapper.*Next step:"):
        subject.patch(held, mode)


def test_an_adapters_checkpoint_does_not_know_the_patch(subject):
    held = _wrapped(build(Shape()), lora_config(*ATTENTION_AND_MLP))
    plain = peft.get_peft_model_state_dict(held)
    for mode in ("auto", "legacy"):
        with patched(subject, held, mode):
            while_patched = peft.get_peft_model_state_dict(held)
        assert while_patched.keys() == plain.keys()


def test_pefts_own_layer_runs_on_no_megatron():
    """Why lora.py has a layer: peft 0.18.1 to 0.21.2 fail to make theirs; made, its forward takes tuples for tensors.

    When this one fails, peft has been repaired: use its own layer above.
    """
    model, batch = build(Shape()), batch_for(97, 2, 6)
    config = peft.LoraConfig(
        r=4, target_modules=["linear_fc1"], megatron_config=copy.deepcopy(model.config), megatron_core="megatron.core"
    )
    with pytest.raises((KeyError, TypeError), match=r"fan_in_fan_out|'default'|can't multiply sequence"):
        peft.inject_adapter_in_model(config, model)(*batch.inputs)
