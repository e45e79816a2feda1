"""Patching, modes and the fused call, on models of a few lines: what is installed, refused, handed on and proved.

What real models and wrappers do with it is proved in the cells.
"""

import types

import pytest
import torch
from torch import nn

from mcore_fused import patch
from mcore_fused.errors import (
    CallTypeError,
    ForeignPatchError,
    FusionDidNotRunError,
    ModeError,
    PatchOrderError,
    UnsupportedConfigError,
)
from mcore_fused.model.unwrap import WrapperChain
from mcore_fused.modes.hook import fused_output_processor
from mcore_fused.modes.legacy import LegacyForward
from mcore_fused.outputs import FusedCall, FusedForwardOutput, FusedOutputProcessorContext
from mcore_fused.patch import (
    call_fused_forward,
    fused_forward,
    fused_forward_mode,
    patch_fused_forward,
    unpatch_fused_forward,
)


class Model(nn.Module):
    """Has the hook; runs it as often as it is told to, and keeps what it was given."""

    times = 1

    def __init__(self, head=True):
        super().__init__()
        self.head = head
        self.seen = None

    def forward(self, input_ids, labels=None, extra=None, output_processor=None, output_processor_context=None):
        self.seen = types.SimpleNamespace(
            labels=labels, extra=extra, processor=output_processor, carried=output_processor_context
        )
        if output_processor is None:
            return "stock"
        output_processor_context.receipts.extend(["hook"] * self.times)
        rows = torch.ones(2, 3)
        return (
            torch.stack((rows, rows * 2))
            if output_processor_context.settings.single_tensor
            else FusedForwardOutput(rows, rows * 2, None)
        )


class WithoutHook(nn.Module):
    head = True

    def forward(self, input_ids, labels=None):
        return "stock"


class Outer(nn.Module):
    """Hands on no keyword that it does not know."""

    def __init__(self, model, passes=()):
        super().__init__()
        self.model, self.passes = model, dict.fromkeys(passes)

    def forward(self, input_ids, labels=None, image=None):
        return "outer", self.model(input_ids, labels=labels, extra=image, **self.passes)


class Wrapped(nn.Module):
    """A wrapper that knows tensors only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def chain_of(held):
    if isinstance(held, Outer | Wrapped):
        is_outer = isinstance(held, Outer)
        return WrapperChain(held, held.model, (held,), transparent=not is_outer, tensors_only=not is_outer)
    return WrapperChain(held, held, (), transparent=True)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Small models in place of Megatron's; keeps for which model and wrappers a head was checked."""
    seen = []
    monkeypatch.setattr(patch, "unwrap_chain", chain_of)
    monkeypatch.setattr(patch, "unwrap_model", lambda held: chain_of(held).model)
    monkeypatch.setattr(patch, "check_head", lambda model, wrappers: seen.append((model, wrappers)))
    monkeypatch.setattr(patch, "get_head", lambda model: model if model.head else None)
    monkeypatch.setattr(patch, "proved_mode", lambda model: "hook" if isinstance(model, Model) else "legacy")
    return seen


def labels():
    return torch.zeros(2, 3, dtype=torch.int64)


def test_the_mode_is_proved_once_and_a_patched_model_answers_with_its_own(checked, monkeypatch):
    proved = []
    monkeypatch.setattr(patch, "proved_mode", lambda model: proved.append(model) or "hook")
    model = Model()
    held = Wrapped(model)
    assert [fused_forward_mode(held), fused_forward_mode(model)] == ["hook", "hook"]
    assert proved == [model]
    assert checked == [(model, (held,)), (model, ())]
    assert patch_fused_forward(model, "legacy") == "legacy"
    assert fused_forward_mode(model) == "legacy"
    unpatch_fused_forward(model)
    del checked[:]
    patch_fused_forward(model, "hook")
    before = len(checked)
    assert fused_forward_mode(model) == "hook"
    assert len(checked) == before  # what is patched was checked when it was patched


def test_chunks_are_patched_in_the_one_mode_that_serves_all():
    """A list of chunks with one that has no hook; a chunk that had hook mode alone changes over."""
    first, second, third = Model(), WithoutHook(), Model()
    assert fused_forward_mode([first, third]) == "hook"
    assert fused_forward_mode([first, second]) == "legacy"
    assert patch_fused_forward([first, second]) == "legacy"
    assert all(isinstance(vars(chunk)["forward"], LegacyForward) for chunk in (first, second))
    forwards = [vars(chunk)["forward"] for chunk in (first, second)]
    assert patch_fused_forward([first, second]) == "legacy"
    assert [vars(chunk)["forward"] for chunk in (first, second)] == forwards  # repeating it changes nothing
    unpatch_fused_forward([first, second])
    assert all("forward" not in vars(chunk) for chunk in (first, second))
    assert patch_fused_forward([first, third]) == "hook"
    assert patch.is_patched([first, third])
    assert not patch.is_patched([first, second])
    assert "forward" not in vars(first)


def test_a_chunk_in_hook_mode_joins_legacy_chunks():
    first, second = Model(), WithoutHook()
    patch_fused_forward(first)
    assert patch_fused_forward([first, second]) == "legacy"
    assert isinstance(vars(first)["forward"], LegacyForward)
    unpatch_fused_forward(first)
    assert not patch.is_patched(first)


def refused(error, call, problem, step):
    with pytest.raises(error) as refusal:
        call()
    assert type(refusal.value) is error
    assert problem in refusal.value.problem
    assert refusal.value.next_step == step


def test_a_mode_that_cannot_be_is_refused_with_what_can():
    refused(
        ModeError,
        lambda: patch_fused_forward(Model(), "fast"),
        "there is no mode 'fast'.",
        'pass "auto", "hook" or "legacy".',
    )
    refused(
        ModeError,
        lambda: patch_fused_forward(WithoutHook(), "hook"),
        "WithoutHook.forward has no parameters output_processor and output_processor_context.",
        'use mode="auto"; legacy mode gives every release the same results.',
    )
    for installed, other in (("hook", "legacy"), ("legacy", "hook")):
        model = Model()
        patch_fused_forward(model, installed)
        assert patch_fused_forward(model, "auto") == patch_fused_forward(model, installed) == installed
        refused(
            ModeError,
            lambda model=model, other=other: patch_fused_forward(model, other),
            f"this model is already patched in {installed} mode.",
            "unpatch it first.",
        )


def test_the_patch_of_somebody_else_is_named_and_left_alone():
    def theirs(*_, **__): ...

    for ask in (fused_forward_mode, patch_fused_forward, lambda model: patch_fused_forward(model, "legacy")):
        model = Model()
        model.forward = theirs
        refused(
            ForeignPatchError,
            lambda ask=ask, model=model: ask(model),
            f"forward of this {__name__}.Model instance is already replaced by {__name__}.{theirs.__qualname__}.",
            "remove that patch first, or install it after this one and remove it before this one.",
        )
        assert vars(model)["forward"] is theirs


@pytest.mark.parametrize("mode", ["hook", "legacy"])
def test_a_patch_on_top_of_ours_stops_the_removal_of_all_chunks(mode):
    def theirs(*_, **__): ...

    first, second = Model(), Model()
    patch_fused_forward([first, second], mode)
    second.forward = theirs
    refused(
        PatchOrderError,
        lambda: unpatch_fused_forward([first, second]),
        f"forward of this {__name__}.Model instance was replaced by {__name__}.{theirs.__qualname__} "
        "after it was patched.",
        "remove that patch first.",
    )
    assert patch.is_patched(first)
    assert vars(second)["forward"] is theirs


def test_the_context_manager_takes_back_only_what_it_installed():
    model = Model()
    with fused_forward(model) as mode:
        assert (mode, patch.is_patched(model)) == ("hook", True)
    assert not patch.is_patched(model)

    def fails():
        with fused_forward(model, "legacy") as mode:
            assert mode == "legacy"
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "forward" not in vars(model)
    patch_fused_forward(model)
    with fused_forward(model):
        pass
    assert patch.is_patched(model)


def test_evidence_is_asked_of_the_head(monkeypatch):
    monkeypatch.setattr(patch.evidence, "evidence_for", lambda layer: ("evidence of", layer))
    model = Model()
    assert patch.fused_forward_evidence(Wrapped(model)) == ("evidence of", model)


def test_a_fused_call_asks_for_fusion_with_its_own_context():
    model, given = Model(), labels()
    patch_fused_forward(model)
    output = call_fused_forward(model, "ids", labels=given, extra=7, temperature=0.5)
    assert isinstance(output, FusedForwardOutput)
    assert model.seen.processor is fused_output_processor
    call = model.seen.carried
    assert isinstance(call, FusedCall)
    assert (call.settings.temperature, call.labels is given, call.receipts) == (0.5, True, ["hook"])
    assert (model.seen.labels is given, model.seen.extra) == (True, 7)
    call_fused_forward(model, "ids", labels=given)
    assert model.seen.carried.settings.temperature == 1.0


def test_a_context_of_the_caller_is_used_and_not_changed():
    model, mine = Model(), FusedOutputProcessorContext(temperature=0.25, ignore_index=-1)
    patch_fused_forward(model)
    call_fused_forward(model, "ids", labels=labels(), temperature=9.0, context=mine)
    assert model.seen.carried.settings is mine
    assert mine == FusedOutputProcessorContext(temperature=0.25, ignore_index=-1)


def test_labels_are_found_among_positional_arguments_too():
    model, given = Model(), labels()
    patch_fused_forward(model)
    call_fused_forward(model, "ids", given)
    assert model.seen.carried.labels is given
    call_fused_forward(model, "ids", given, 7)
    assert (model.seen.carried.labels is given, model.seen.extra) == (True, 7)
    assert call_fused_forward(model, "ids") == "stock"
    assert call_fused_forward(model, "ids", None) == "stock"
    assert call_fused_forward(model, "ids", labels=None) == "stock"
    assert model.seen.processor is None
    call_fused_forward(model, "ids", extra=7)
    assert model.seen.extra == 7


def test_a_head_is_checked_with_its_wrappers_before_anything_is_installed(checked):
    model = Model()
    held = Wrapped(model)
    patch_fused_forward(held, "legacy")
    assert checked == [(model, (held,))]
    assert vars(model)["forward"].original == Model.forward.__get__(model)


def test_a_model_whose_forward_has_no_labels_gets_none():
    class Other(Model):
        def forward(self, input_ids, targets=None, output_processor=None, output_processor_context=None):
            return "stock"

    model = Other()
    patch_fused_forward(model)
    assert call_fused_forward(model, "ids", labels()) == "stock"


@pytest.mark.parametrize("times", [0, 2])
def test_fusion_that_did_not_run_once_is_an_error(times):
    model = Model()
    model.times = times
    patch_fused_forward(model)
    refused(
        FusionDidNotRunError,
        lambda: call_fused_forward(model, "ids", labels=labels()),
        f"Model ran its fused head {times} times in one call.",
        'patch it with mode="legacy", which does not depend on the hook being called.',
    )


def test_a_stage_without_a_head_runs_nothing_and_that_is_right():
    model = Model(head=False)
    model.times = 0
    patch_fused_forward(model)
    assert isinstance(call_fused_forward(model, "ids", labels=labels()), FusedForwardOutput)


def test_a_model_that_is_not_patched_is_refused():
    refused(
        ModeError,
        lambda: call_fused_forward(Model(), "ids", labels=labels()),
        "this model is not patched.",
        "call patch_fused_forward(model) or use fused_forward(model).",
    )


def test_an_outer_model_is_served_by_arming_the_inner_one_for_one_call():
    """It may cut or merge labels on their way, so they are not compared with the caller's."""
    model = Model()
    outer = Outer(model)
    patch_fused_forward(outer)
    name, output = call_fused_forward(outer, "ids", labels=labels(), image=7, temperature=0.5)
    assert model.seen.extra == 7
    assert (name, type(output)) == ("outer", FusedForwardOutput)
    assert (model.seen.carried.settings.temperature, model.seen.carried.labels) == (0.5, None)
    assert "forward" not in vars(model)
    assert outer("ids") == ("outer", "stock")
    # Positions of an outer signature say nothing of the inner one's labels.
    assert call_fused_forward(outer, "ids", labels()) == ("outer", "stock")


def test_an_outer_model_that_asks_for_fusion_itself_is_refused():
    outer = Outer(Model(), passes=("output_processor_context", "output_processor"))
    patch_fused_forward(outer)
    refused(
        CallTypeError,
        lambda: call_fused_forward(outer, "ids", labels=labels()),
        "the outer model passed output_processor, output_processor_context itself.",
        "call it directly with output_processor=.",
    )


def test_outputs_travel_as_one_tensor_through_wrappers_that_know_nothing_else():
    model = Model()
    held = Wrapped(model)
    patch_fused_forward(held)
    output = call_fused_forward(held, "ids", labels=labels())
    assert model.seen.carried.settings.single_tensor is True
    assert (output.log_probs.tolist()[0], output.entropy.tolist()[0]) == ([1, 1, 1], [2, 2, 2])
    own = call_fused_forward(held, "ids", labels=labels(), context=FusedOutputProcessorContext(single_tensor=True))
    assert own.shape == (2, 2, 3)  # the caller asked for the tensor, and gets it


def test_what_one_tensor_cannot_carry_is_refused(monkeypatch):
    step = "pass a context with single_tensor=True, and take [2, batch, seq] out of what the model returns."
    held = Wrapped(Model())
    patch_fused_forward(held)
    keeping = FusedOutputProcessorContext(return_hidden_states=True)
    refused(
        UnsupportedConfigError,
        lambda: call_fused_forward(held, "ids", labels=labels(), context=keeping),
        "Model passes on one tensor of outputs, and not return_hidden_states.",
        step,
    )
    outer = Outer(Model())
    patch_fused_forward(outer)
    both = WrapperChain(outer, outer.model, (outer,), transparent=False, tensors_only=True)
    monkeypatch.setattr(patch, "unwrap_chain", lambda held: both)
    refused(
        UnsupportedConfigError,
        lambda: call_fused_forward(outer, "ids", labels=labels()),
        f"{__name__}.Model passes on one tensor of outputs, and not the outer {__name__}.Outer.",
        step,
    )
