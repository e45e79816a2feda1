"""The dry run that proves a mode, on models of a few lines: what it asks, what it hands over, what it says."""

import functools
import types

import pytest
import torch
from torch import nn

from mcore_fused.errors import McoreFusedError, ModeError, UnusableHookWarning
from mcore_fused.modes import capability
from mcore_fused.modes.capability import declares_hook, hook_reached, proved_mode
from mcore_fused.modes.hook import REQUIRED_KEYWORDS


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


class Head(nn.Module):
    """An output layer that must not run in a dry run."""

    def __init__(self, tp_size=1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
        self.tp_group = Group(tp_size)

    def forward(self, *_, **__):
        raise AssertionError("the head ran")


class Model(nn.Module):
    """Calls its processor, and keeps what it was given."""

    def __init__(self, tp_size=1, with_head=True):
        super().__init__()
        self.config = types.SimpleNamespace(hidden_size=4)
        if with_head:
            self.output_layer = Head(tp_size)
        self.seen = None

    def forward(
        self, input_ids, position_ids, attention_mask, decoder_input=None, labels="not given",
        output_processor=None, output_processor_context="not given",
    ):  # fmt: skip
        self.seen = (input_ids, position_ids, attention_mask, decoder_input, labels, output_processor_context)
        return output_processor(**dict.fromkeys(REQUIRED_KEYWORDS))


class Ignoring(Model):
    """Names the hook and goes on to its own head."""

    def forward(self, input_ids, *_, decoder_input=None, output_processor=None, output_processor_context=None, **__):
        logits, _ = self.output_layer(decoder_input)
        assert logits.shape == (1, 1, 1)
        return logits


class Without(Model):
    def forward(self, input_ids):
        raise AssertionError("a model without the hook needs no dry run")


@pytest.fixture(autouse=True)
def _any_head(monkeypatch):
    """Heads of these models are no layers of Megatron."""
    monkeypatch.setattr(capability, "get_head", lambda model: getattr(model, "output_layer", None))


def test_a_decorator_is_asked_for_its_own_signature():
    """What a decorated function names is not what its decorator hands on."""

    def hook(output_processor=None, output_processor_context=None): ...

    def half(output_processor=None): ...

    @functools.wraps(hook)
    def decorated(*args, **kwargs): ...

    assert declares_hook(hook)
    assert not declares_hook(half)
    assert not declares_hook(decorated)
    assert not declares_hook(type)  # a callable without a signature promises nothing


@pytest.mark.parametrize(
    ("model", "mode"),
    [(Model(), "hook"), (Model(with_head=False), "hook"), (Without(), "legacy")],
    ids=["calls it", "a stage without a head", "does not name it"],
)
def test_the_mode_is_what_is_promised_and_seen(model, mode):
    assert proved_mode(model) == mode


class Lacking(Model):
    """Calls its processor without what the fused head needs to scale its logits."""

    def forward(self, input_ids, *_, output_processor=None, output_processor_context=None, **__):
        return output_processor(**dict.fromkeys(REQUIRED_KEYWORDS - {"scale_logits"}))


class BeforeMtp(Model):
    """Has an MTP block and does not run it before the hook."""

    def __init__(self):
        super().__init__()
        self.mtp = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Ignoring(), "it accepts a processor and never calls it"),
        (Lacking(), "it no longer hands over scale_logits"),
        (BeforeMtp(), "it is called before MTP has run"),
    ],
    ids=["ignores it", "lacks a keyword", "comes before MTP"],
)
def test_every_hook_that_cannot_be_used_means_legacy_and_one_warning(model, reason):
    with pytest.warns(UnusableHookWarning) as warned:
        assert proved_mode(model) == "legacy"
    (warning,) = warned
    assert str(warning.message) == (
        f"The output_processor hook of {__name__}.{type(model).__name__} is not used, because {reason}. "
        "Legacy mode gives the same results."
    )


def test_a_stage_without_a_head_shows_nothing():
    assert hook_reached(Model(with_head=False)) is False


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_dry_run_hands_over_what_a_real_call_would(tp_size):
    """A subclass may look at its inputs before it comes to the hook: shapes, dtypes and device are real ones.

    Tokens are as many as tensor-parallel ranks, since sequence parallelism divides them.
    """
    model = Model(tp_size)
    assert hook_reached(model)
    input_ids, position_ids, attention_mask, decoder_input, labels, context = model.seen
    for tokens in (input_ids, position_ids):
        assert (tokens.shape, tokens.dtype) == ((1, tp_size), torch.int64)
        assert tokens.device == model.output_layer.weight.device
    assert (decoder_input.shape, decoder_input.dtype) == ((1, 1, 4), torch.bfloat16)
    assert decoder_input.device == model.output_layer.weight.device
    assert (attention_mask, labels, context) == (None, None, None)


def test_the_dry_run_is_on_the_models_device():
    model = Model().to("meta")
    assert hook_reached(model)
    assert {tensor.device.type for tensor in model.seen[:2]} == {"meta"}
    assert model.seen[3].device.type == "meta"


class Demanding(Model):
    """A new required parameter: the dry run cannot know what to pass."""

    def forward(self, input_ids, *_, something_new, output_processor=None, output_processor_context=None, **__): ...


class Refusing(Model):
    def forward(self, *_, output_processor=None, output_processor_context=None, **__):
        raise McoreFusedError("a problem.", "a remedy.")


def test_a_dry_run_that_fails_proves_nothing_and_says_what_failed():
    with pytest.raises(ModeError, match=r"\.Demanding declares the output_processor hook") as failed:
        hook_reached(Demanding())
    assert "failed: TypeError: " in failed.value.problem
    assert failed.value.next_step == (
        'pass mode="hook" or mode="legacy" to patch_fused_forward; every fused call is verified in any case.'
    )
    assert isinstance(failed.value.__cause__, TypeError)


def test_a_refusal_of_our_own_is_passed_on_as_it_is():
    with pytest.raises(McoreFusedError, match=r"^a problem\."):
        hook_reached(Refusing())
