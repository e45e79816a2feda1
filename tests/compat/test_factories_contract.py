"""What the forward functions promise besides numbers: they restore, they refuse, they pass through, they fuse."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support.models import DEVICE, Shape, build, shared
from support.models.packed import Rows

pytestmark = pytest.mark.needs("factories", "float64")

SHAPE = Shape(packed=True)


def _call(
    model, rows, *, fused=True, padded=False, vision_model=False, multi_modal_inputs=None, mode="auto", **options
):
    from mcore_fused.frameworks import forward as model_forward

    container = "model" if padded else "no_padding"
    name = f"fused_forward_{container}_gen" if fused else f"forward_{container}_gen"
    forward = getattr(model_forward, name)(vision_model, *([mode] if fused else []))
    if padded:
        ids, labels, mask, counted = rows.padded([list(range(len(row))) for row in rows.ids], 8)
        return forward(model, ids, None, mask, labels, counted, 1.0, multi_modal_inputs)
    return forward(model, rows.nested, rows.nested, multi_modal_inputs, 1.0, True, 0, **options)


def _vars(model, rows, **options):
    """What every module holds after an unfused call: upstream's layers note things of their own in their first one."""
    with torch.no_grad():
        _call(model, rows, fused=False, **options)
    return _held(model)


def _held(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def _assert_untouched(model, before):
    now = _held(model)
    assert now.keys() == before.keys()
    for name, attributes in before.items():
        assert now[name].keys() == attributes.keys(), name
        assert all(now[name][key] is value for key, value in attributes.items()), name


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_model_is_what_it_was_after_a_call_and_after_a_failure(padded, mode):
    """P1, P2: patch, call, restore; also when forward raises half-way."""
    model, rows = build(SHAPE), Rows.of(97, (4, 2))
    before = _vars(model, rows, padded=padded)
    with torch.no_grad():
        _call(model, rows, padded=padded, mode=mode)
    _assert_untouched(model, before)

    class Broken(RuntimeError):
        pass

    def broken(*args, **kwargs):
        raise Broken

    handle = model.decoder.register_forward_pre_hook(broken)
    before = _held(model)
    with pytest.raises(Broken):
        _call(model, rows, padded=padded, mode=mode)
    _assert_untouched(model, before)
    handle.remove()


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_model_that_was_patched_before_stays_patched(mode):
    """verl patches at start-up and then calls; the call must not take that away."""
    import mcore_fused

    model, rows = build(SHAPE), Rows.of(97, (4, 2))
    with torch.no_grad():
        _call(model, rows, fused=False)
    mcore_fused.patch_fused_forward(model, mode)
    before = _held(model)
    with torch.no_grad():
        _call(model, rows)
    _assert_untouched(model, before)
    mcore_fused.unpatch_fused_forward(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("padded", [False, True])
def test_fusion_runs_once_a_call_and_never_in_the_unfused_counterpart(padded):
    """P7: counted where it happens, not where it was promised."""
    import mcore_fused

    model, rows = build(SHAPE), Rows.of(97, (4, 2))

    def runs():
        seen = mcore_fused.fused_forward_evidence(model)
        return seen.hook_calls + seen.deferred_head_calls

    with torch.no_grad():
        start = runs()  # proving the mode may have run the head
        with mcore_fused.fused_forward(model):
            start = runs()
        _call(model, rows, padded=padded)
        assert runs() == start + 1
        _call(model, rows, padded=padded, fused=False)
        assert runs() == start + 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_a_stage_without_a_head_returns_its_hidden_states(padded, fused):
    """P8: the first of two stages hands on what the model gives, packed as it came."""
    model, rows = shared(Shape(packed=True, post_process=False)), Rows.of(97, (4, 2))
    with torch.no_grad():
        hidden = _call(model, rows, padded=padded, fused=fused)
    assert hidden.shape == (6, 1, 32)


@pytest.mark.parametrize("fused", [True, False])
def test_inputs_that_the_model_cannot_take_are_refused(fused):
    """P10: nothing that changes the result is dropped; the loaders' book-keeping is."""
    from mcore_fused.errors import CallTypeError

    model, rows = shared(SHAPE), Rows.of(97, (4, 2))
    with torch.no_grad():
        _call(model, rows, fused=fused, multi_modal_inputs={"images_seqlens": torch.ones(1)})
        for padded in (False, True):
            with pytest.raises(CallTypeError, match="does not accept pixel_values"):
                _call(model, rows, fused=fused, padded=padded, multi_modal_inputs={"pixel_values": torch.ones(1)})


def test_a_router_mask_reaches_the_model_or_is_refused():
    """P10: releases before 0.16 have no padding mask; the MoE router would look at padding there."""
    from mcore_fused.errors import CallTypeError, PackingError
    from mcore_fused.frameworks.inputs import accepts, read_stage

    model, rows, seen = build(SHAPE), Rows.of(97, (4, 2)), []
    mask = torch.zeros(1, 6, dtype=torch.bool, device=DEVICE)
    if accepts(read_stage(model).chain, "padding_mask"):
        model.decoder.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["padding_mask"]), with_kwargs=True
        )
        with torch.no_grad():
            _call(model, rows, router_padding_mask=mask)
        assert torch.equal(seen[-1], mask)  # before it, the proof of the mode ran the decoder without a mask
    else:
        with pytest.raises(CallTypeError, match="padding_mask"):
            _call(model, rows, router_padding_mask=mask)
    with pytest.raises(PackingError, match="router_padding_mask"):
        _call(model, rows, router_padding_mask=mask[:, :5])


def test_impossible_temperatures_are_refused_alike():
    """K6: the same refusal fused and unfused, before the model runs."""
    from mcore_fused.errors import CallArgumentError
    from mcore_fused.frameworks.forward import forward_no_padding_gen, fused_forward_no_padding_gen

    model, nested = shared(SHAPE), Rows.of(97, (4, 2)).nested
    for forward in (fused_forward_no_padding_gen(), forward_no_padding_gen()):
        for wrong in (0, -1.0, float("nan"), torch.tensor([1.0, 0.0], device=DEVICE)):
            with pytest.raises(CallArgumentError, match="temperature"):
                forward(model, nested, nested, {}, wrong, True, 0)


def test_position_ids_travel_with_their_tokens():
    """A padded batch's position ids are packed as its ids are; without any, each row counts from 0."""
    from mcore_fused.frameworks.forward import fused_forward_model_gen

    model, rows, seen = build(SHAPE), Rows.of(97, (3, 2)), []
    model.embedding.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    ids, labels, mask, counted = rows.padded(([1, 2, 3], [0, 3]), 4)
    positions = torch.arange(8, device=DEVICE).reshape(2, 4)
    with torch.no_grad():
        for given in (positions, None):
            fused_forward_model_gen()(model, ids, given, mask, labels, counted, 1.0, {})
    assert [call["position_ids"].tolist() for call in seen] == [[[1, 2, 3, 4, 7]], [[0, 1, 2, 0, 1]]]


class VisionModel(torch.nn.Module):
    """Like the bridges' vision-language models: padded ids in, images merged, then packed; knows no other keyword."""

    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model
        self.config = copy.copy(language_model.config)
        self.config.sequence_parallel = True  # P14: the wrapper's own facts must not be read
        self.pre_process, self.post_process = False, False
        self.images = []

    def forward(self, input_ids, position_ids, attention_mask, packed_seq_params, labels=None, pixel_values=None):
        from mcore_fused.packing import PackingLayout

        assert position_ids is None
        self.images.append(pixel_values)
        layout = PackingLayout.from_mask(attention_mask)
        return self.language_model(
            layout.pack_ids(input_ids), layout.position_ids, None, labels=labels, packed_seq_params=packed_seq_params
        )


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("padded", [False, True])
def test_vision_models_get_padded_ids_and_their_images(padded, mode):
    """P1, P10, P14, L9: the outer model takes no hook keyword; the inner one is armed for the call, then restored."""
    language, rows = build(SHAPE), Rows.of(97, (4, 2))
    outer = VisionModel(language)
    image = torch.ones(2)
    options = {"padded": padded, "vision_model": True, "multi_modal_inputs": {"pixel_values": image}}
    before = _vars(outer, rows, **options)
    outer.images.clear()
    with torch.no_grad():
        fused = _call(outer, rows, mode=mode, **options)
        unfused = _call(outer, rows, fused=False, **options)
        plain = _call(language, rows, padded=padded)
    _assert_untouched(outer, before)
    assert len(outer.images) == 2
    assert all(torch.equal(seen.cpu(), image) for seen in outer.images)
    for name, value in plain.items():
        expected, results = value, (fused[name], unfused[name])
        if value.is_nested:
            expected, results = value.values(), tuple(result.values() for result in results)
        assert all((result - expected).abs().max().item() <= 1e-9 for result in results)


class LabelsOfItsOwn(VisionModel):
    """An outer model that hands other labels to its language model than it was given."""

    def forward(self, input_ids, position_ids, attention_mask, packed_seq_params, labels=None, loss_mask=None):
        labels = labels.clone()
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params, labels=labels)


@pytest.mark.needs("refusal")
@pytest.mark.since("mtp")
def test_mtp_behind_labels_of_an_outer_model_is_refused_unfused():
    """Stock logits are read at the caller's own labels; a loss must never be taken for logits."""
    from mcore_fused.errors import UnsupportedConfigError

    language, rows = build(Shape(packed=True, mtp=1)), Rows.of(97, (4, 2))
    before = dict(vars(language))
    with torch.no_grad(), pytest.raises((UnsupportedConfigError, AssertionError)) as caught:
        _call(LabelsOfItsOwn(language), rows, fused=False, vision_model=True)
    if not isinstance(caught.value, UnsupportedConfigError):  # 0.12 and 0.13 refuse MTP with packed batches themselves
        assert "sequence packing is not yet supported" in str(caught.value)
    else:
        assert "labels of its own" in str(caught.value)
    assert vars(language) == before


def test_a_vision_model_needs_a_padding_token():
    from mcore_fused.errors import CallArgumentError
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    nested = Rows.of(97, (4, 2)).nested
    with pytest.raises(CallArgumentError, match="pad_token_id"):
        fused_forward_no_padding_gen(vision_model=True)(VisionModel(shared(SHAPE)), nested, nested, {}, 1.0, True, None)


def test_a_vision_model_gets_rows_filled_with_its_padding_token():
    """The padding token is the tokenizer's: 0 may be a word, or the mark of an image."""
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    seen, nested = [], Rows.of(97, (4, 2)).nested
    model = VisionModel(build(SHAPE))
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append((kwargs["input_ids"], kwargs["attention_mask"])), with_kwargs=True
    )
    with torch.no_grad():
        fused_forward_no_padding_gen(vision_model=True)(model, nested, nested, {}, 1.0, True, 31)
    ((ids, mask),) = seen
    assert torch.equal(ids[mask], nested.values())
    assert mask.sum() < mask.numel()
    assert (ids[~mask] == 31).all()


def test_the_models_own_context_parallel_group_decides():
    """A model built with groups of its own is not split over the global ones."""
    from mcore_fused.frameworks.inputs import read_stage

    model = build(SHAPE)
    own = torch.distributed.new_group([0])
    for name in ("pg_collection", "model_comm_pgs"):
        if hasattr(model, name) or name == "pg_collection":
            setattr(model, name, SimpleNamespace(cp=own))
    groups = read_stage(model).groups
    assert groups.cp_group is own
    assert (groups.cp_size, groups.cp_rank, groups.tp_size) == (1, 0, 1)
