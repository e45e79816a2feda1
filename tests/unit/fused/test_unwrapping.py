"""The walk from what a framework holds to the language model: what it hands on, and what it refuses by name."""

import pytest
from torch import nn

from mcore_fused.errors import UnsupportedModelError
from mcore_fused.model import unwrap
from mcore_fused.model.unwrap import get_chunks, register_wrapper, unwrap_chain, unwrap_model


class LanguageModel(nn.Module):
    post_process = True

    def compute_language_model_loss(self, labels, logits):
        raise NotImplementedError


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


class SpecialHolder(Holder):
    """Registered wrappers cover their subclasses."""


class Vision(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.language_model = inner


@pytest.fixture(params=[True, False], ids=["transparent", "opaque"])
def transparent(request, monkeypatch):
    monkeypatch.setattr(unwrap, "_TRANSPARENT", dict(unwrap._TRANSPARENT))
    monkeypatch.setattr(unwrap, "_OPAQUE", dict(unwrap._OPAQUE))
    register_wrapper(f"{__name__}.Holder", "inner", transparent=request.param)
    return request.param


def test_a_model_is_its_own_chain():
    model = LanguageModel()
    chain = unwrap_chain(model)
    assert (chain.outer, chain.model, chain.wrappers, chain.transparent) == (model, model, (), True)


def test_registered_wrappers_say_whether_keywords_pass(transparent):
    model = LanguageModel()
    outer = SpecialHolder(Holder(model))
    chain = unwrap_chain(outer)
    assert chain.model is model
    assert chain.wrappers == (outer, outer.inner)
    assert chain.transparent is transparent


def test_one_opaque_wrapper_is_enough(transparent):
    for outer in (Vision(Holder(LanguageModel())), Holder(Vision(LanguageModel()))):
        assert unwrap_chain(outer).transparent is False


def test_an_unknown_wrapper_is_named_with_the_way_to_it():
    with pytest.raises(UnsupportedModelError, match=r"Holder is neither a known wrapper") as caught:
        unwrap_model(Holder(LanguageModel()))
    assert "register_wrapper" in caught.value.next_step
    with pytest.raises(UnsupportedModelError, match=r"reached through Vision"):
        unwrap_model(Vision(Holder(LanguageModel())))


def test_a_chain_that_never_ends(transparent):
    outer = Holder(LanguageModel())
    outer.__dict__["inner"] = outer
    with pytest.raises(UnsupportedModelError, match="Holder"):
        unwrap_model(outer)


def test_as_deep_as_anybody_wraps(transparent):
    model = outer = LanguageModel()
    for _ in range(32):
        outer = Holder(outer)
    assert unwrap_model(outer) is model


@pytest.mark.parametrize("thing", [None, "model", object(), [LanguageModel]])
def test_what_is_no_module_is_named(thing):
    with pytest.raises(UnsupportedModelError, match="is not a torch module"):
        unwrap_model(thing)


def test_chunks():
    first, second = LanguageModel(), LanguageModel()
    assert get_chunks(first) == (first,)
    assert get_chunks([first, second]) == get_chunks((first, second)) == get_chunks(nn.ModuleList([first, second]))
    for empty in ([], (), nn.ModuleList()):
        with pytest.raises(UnsupportedModelError, match="no model chunk"):
            get_chunks(empty)


def test_of_megatron_fsdp_s_two_classes_the_proved_one_is_known():
    """Upstream's main: `FullyShardedDataParallel` is a function there, and what it returns is a V1 or a V2."""

    class Sharded(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    model = LanguageModel()
    Sharded.__module__ = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
    Sharded.__qualname__ = "FullyShardedDataParallelV1"
    chain = unwrap_chain(Sharded(model))
    assert (chain.model, chain.transparent) == (model, True)
    Sharded.__qualname__ = "FullyShardedDataParallelV2"
    with pytest.raises(UnsupportedModelError, match="FullyShardedDataParallelV2 is neither a known wrapper"):
        unwrap_chain(Sharded(model))
