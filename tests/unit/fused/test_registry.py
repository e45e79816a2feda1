"""The registry: one architecture, known, or a typed error; open for registration."""

import copy
import inspect
from types import SimpleNamespace

import pytest

from mcore_fused.errors import MCoreFusedError, RegistryError
from mcore_fused.frameworks import registry
from mcore_fused.frameworks.registry import (
    get_mcore_forward_fused_fn,
    get_mcore_forward_fused_model_engine_fn,
    register_architecture,
    registered_architectures,
)

GETTERS = {
    get_mcore_forward_fused_fn: "fused_forward_model_gen",
    get_mcore_forward_fused_model_engine_fn: "fused_forward_no_padding_gen",
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(registry, "_vision_model", copy.copy(registry._vision_model))


@pytest.mark.parametrize("getter", GETTERS)
@pytest.mark.parametrize(("name", "vision"), registered_architectures().items())
def test_every_registered_architecture_gets_the_forward_of_its_kind(getter, name, vision, monkeypatch):
    asked = []
    monkeypatch.setattr(registry, GETTERS[getter], lambda vision_model: asked.append(vision_model) or "forward")
    assert getter(SimpleNamespace(architectures=[name])) == "forward"
    assert asked == [vision]


def test_language_and_vision_language_models_are_registered():
    known = registered_architectures()
    assert known["LlamaForCausalLM"] is False
    assert known["Qwen2_5_VLForConditionalGeneration"] is True


@pytest.mark.parametrize("getter", GETTERS)
@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(architectures=["LlamaForCausalLM", "Qwen2ForCausalLM"]),
        SimpleNamespace(architectures=[]),
        SimpleNamespace(architectures=None),
        SimpleNamespace(architectures="LlamaForCausalLM"),
        SimpleNamespace(),
    ],
)
def test_none_and_several_architectures_are_refused(getter, config):
    with pytest.raises(RegistryError) as refusal:
        getter(config)
    assert isinstance(refusal.value, MCoreFusedError)
    assert refusal.value.next_step


@pytest.mark.parametrize("getter", GETTERS)
def test_an_architecture_that_nobody_registered_gets_the_language_forward(getter, monkeypatch):
    """The model is checked when it is called; its name says nothing about its head."""
    asked = []
    monkeypatch.setattr(registry, GETTERS[getter], lambda vision_model: asked.append(vision_model) or "forward")
    assert getter(SimpleNamespace(architectures=["NoSuchModel"])) == "forward"
    assert asked == [False]
    assert "NoSuchModel" not in registered_architectures()


def test_an_architecture_can_be_registered_once_and_repeated_but_not_changed():
    register_architecture("MyVision", vision_model=True)
    register_architecture("MyVision", vision_model=True)
    assert registered_architectures()["MyVision"] is True
    with pytest.raises(RegistryError, match="already registered as a vision-language model"):
        register_architecture("MyVision")
    for wrong in ("", None):
        with pytest.raises(RegistryError):
            register_architecture(wrong)


def test_signatures_are_the_fields():
    """A framework that calls by verl's keywords (0.9.1), in verl's order, finds them."""
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    padded = "model input_ids position_ids attention_mask labels labels_mask temperature multi_modal_inputs"
    jagged = (
        "model input_ids labels multi_modal_inputs temperature calculate_entropy pad_token_id cp_layout "
        "local_cp_size router_padding_mask pad_to_length_bucket"
    )
    assert list(inspect.signature(get_mcore_forward_fused_fn(config)).parameters) == padded.split()
    assert list(inspect.signature(get_mcore_forward_fused_model_engine_fn(config)).parameters) == jagged.split()
