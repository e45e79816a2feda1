"""The forward functions a framework calls: fused equals unfused equals the rows alone, in the caller's container.

Fused and unfused run the same packed model; only the head differs. Both form the same float64 dot products and
log-sum-exp, so they agree to (H + V) unit roundoffs times the largest logit, about 1e-11; 1e-9 is asked.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import DEVICE, Shape, build, half_chain, shared
from support.models.packed import Rows, rows_alone

from mcore_compat.testing.reference import assert_same_gradients, gradients

pytestmark = pytest.mark.needs("factories", "float64")

TOLERANCE = 1e-9

shapes = st.builds(Shape, tied=st.booleans(), packed=st.just(True), vocab=st.sampled_from([97, 128]))
row_lengths = st.lists(st.sampled_from([0, 1, 2, 4, 7]), min_size=1, max_size=4).filter(any)


@st.composite
def padded_batches(draw):
    """Rows, their places in a padded batch (left, right, interior), and the batch's tensors."""
    lengths = draw(row_lengths)
    width = max(lengths) + draw(st.integers(0, 3))
    columns = [sorted(draw(st.permutations(range(width)))[:length]) for length in lengths]
    rows = Rows.of(97, lengths, draw(st.integers(0, 1000)))
    return rows, columns, rows.padded(columns, width, fill=draw(st.sampled_from([0, 96])))


def _close(actual, expected):
    return actual.shape == expected.shape and bool((actual.double() - expected.double()).abs().le(TOLERANCE).all())


def _temperature(kind, rows):
    return 0.7 if kind == "number" else torch.linspace(0.5, 2.0, rows, dtype=torch.float64, device=DEVICE)


@given(batch=padded_batches(), shape=shapes, kind=st.sampled_from(["number", "per row"]))
@settings(max_examples=8)
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_padded_batches(batch, shape, kind, mode):
    """L1, L10, K7: log-probs and entropy lie where their tokens lie; the rest is 0; fused equals unfused."""
    from mcore_fused.frameworks.forward import forward_model_gen, fused_forward_model_gen

    rows, columns, (ids, labels, mask, counted) = batch
    model, temperature = shared(shape), _temperature(kind, len(rows.ids))
    arguments = (model, ids, None, mask, labels, counted, temperature, {})
    with torch.no_grad():
        fused = fused_forward_model_gen(mode=mode)(*arguments)
        unfused = forward_model_gen()(*arguments)
        per_row = temperature if isinstance(temperature, torch.Tensor) else [temperature] * len(rows.ids)
        alone = rows_alone(model, rows, per_row)
    assert fused.keys() == unfused.keys() == {"log_probs", "entropy"}
    for part, name in enumerate(("log_probs", "entropy")):
        assert fused[name].shape == mask.shape
        assert _close(fused[name], unfused[name])
        assert not fused[name][~counted].any()
        for row, where in enumerate(columns):
            assert _close(fused[name][row, where], alone[row][part])


@given(lengths=row_lengths, shape=shapes, kind=st.sampled_from(["number", "per row", "per token"]))
@settings(max_examples=8)
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_jagged_batches(lengths, shape, kind, mode):
    """L1, L7, K7: jagged in, jagged out, with the same offsets for one row and for several."""
    from mcore_fused.frameworks.forward import forward_no_padding_gen, fused_forward_model_engine

    model, nested = shared(shape), Rows.of(97, lengths, sum(lengths)).nested
    temperature = _temperature(kind, len(lengths))
    if kind == "per token":
        values = torch.linspace(0.5, 2.0, sum(lengths), dtype=torch.float64, device=DEVICE)
        temperature = torch.nested.nested_tensor_from_jagged(values, nested.offsets())
    arguments = (nested, nested.clone(), {}, temperature, True, 0)
    with torch.no_grad():
        fused = fused_forward_model_engine(mode=mode)(model, *arguments)
        unfused = forward_no_padding_gen()(model, *arguments)
    assert fused.keys() == unfused.keys() == {"log_probs", "entropy"}
    for name, value in fused.items():
        assert value.layout == torch.jagged
        assert value.shape == nested.shape
        assert value.offsets() is unfused[name].offsets() is nested.offsets()
        assert _close(value.values(), unfused[name].values())


@pytest.mark.parametrize("tied", [False, True])
def test_gradients(tied):
    """K4, K16: fused and unfused give every parameter the same gradient, both outputs weighted by token."""
    from mcore_fused.frameworks.forward import forward_no_padding_gen, fused_forward_no_padding_gen

    model, nested = shared(Shape(tied=tied, packed=True)), Rows.of(97, (4, 1, 6), 8).nested
    weights = torch.linspace(-1, 2, 22, dtype=torch.float64, device=DEVICE).reshape(2, 11)
    seen = []
    for forward in (fused_forward_no_padding_gen(), forward_no_padding_gen()):
        output = forward(model, nested, nested, None, 0.7, True, 0)
        (weights[0] * output["log_probs"].values() + weights[1] * output["entropy"].values()).sum().backward()
        seen.append(gradients(model))
    assert_same_gradients(*seen, TOLERANCE)


def test_entropy_comes_only_when_it_is_asked_for():
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    nested = Rows.of(97, (3, 2)).nested
    with torch.no_grad():
        assert fused_forward_no_padding_gen()(shared(Shape(packed=True)), nested, nested, {}, 1.0, False, 0).keys() == {
            "log_probs"
        }


def test_training_chain_in_bf16_gives_fp32():
    """P13, M8: through the real DDP(Float16Module(GPTModel)); both containers; outputs leave the chain as fp32.

    bf16 logits carry 8 bits: unfused they are rounded once, at most 2^-9 of the largest, which is below 64.
    """
    from mcore_fused.frameworks.forward import (
        forward_model_gen,
        forward_no_padding_gen,
        fused_forward_model_gen,
        fused_forward_no_padding_gen,
    )

    chain, rows = half_chain(build(Shape(packed=True, dtype=torch.bfloat16))), Rows.of(97, (5, 3), 2)
    ids, labels, mask, counted = rows.padded((list(range(5)), [1, 2, 4]), 5)
    jagged = (chain, rows.nested, rows.nested, {}, 0.9, True, 0)
    padded = (chain, ids, None, mask, labels, counted, 0.9, {})
    pairs = [
        (fused_forward_no_padding_gen()(*jagged), forward_no_padding_gen()(*jagged)),
        (fused_forward_model_gen()(*padded), forward_model_gen()(*padded)),
    ]
    for fused, unfused in pairs:
        for name, value in fused.items():
            assert value.dtype is torch.float32
            assert unfused[name].dtype is torch.float32
            actual, expected = (item.values() if item.is_nested else item for item in (value, unfused[name]))
            assert (actual - expected).abs().max().item() <= 64 * 2**-8


def _refusal(call):
    """Megatron's own assertion, in its words; empty when the call works."""
    try:
        call()
    except AssertionError as refusal:
        return str(refusal)
    return ""


def _packed_mtp_refusal(model, nested):
    """What this release itself says to MTP with a packed batch; empty where it takes one."""
    from mcore_fused.packing import PackingLayout, packed_seq_params

    layout = PackingLayout.from_nested(nested)
    ids, labels = layout.pack_ids(nested), layout.pack_labels(nested, ignore_index=0)
    stock = {"labels": labels, "packed_seq_params": packed_seq_params(layout)}
    return _refusal(lambda: model(ids, layout.position_ids, None, **stock))


@pytest.mark.since("mtp")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_mtp_is_trained_fused_and_unfused_alike(mode, tied):
    """L6, P7: outputs and every gradient, MTP's own loss included, masked labels and padding not.

    Stock computes MTP's loss in fp32 (unit roundoff 6e-8): gradients that contain it agree to some 1e-6. Older releases
    (0.12, 0.13) refuse MTP with packed batches themselves; then that refusal comes out of both.
    """
    from mcore_fused.frameworks.forward import (
        forward_model_gen,
        forward_no_padding_gen,
        fused_forward_model_gen,
        fused_forward_no_padding_gen,
    )

    model, rows = build(Shape(packed=True, mtp=1, tied=tied)).train(), Rows.of(97, (5, 3), 9)
    ids, labels, mask, counted = rows.padded((list(range(5)), [1, 2, 4]), 5)
    counted[0, 1] = False
    jagged, padded = (rows.nested, rows.nested, {}, 0.7, True, 0), (ids, None, mask, labels, counted, 0.7, {})
    refusal = _packed_mtp_refusal(model, rows.nested)
    for arguments, pair in (
        (jagged, (fused_forward_no_padding_gen(mode=mode), forward_no_padding_gen())),
        (padded, (fused_forward_model_gen(mode=mode), forward_model_gen())),
    ):
        if refusal:
            assert "sequence packing is not yet supported" in refusal
            for forward in pair:
                with pytest.raises(AssertionError, match="sequence packing is not yet supported"):
                    forward(model, *arguments)
            continue
        before, seen = dict(vars(model)), []
        for forward in pair:
            values = [value.values() if value.is_nested else value for value in forward(model, *arguments).values()]
            sum(value.sum() for value in values).backward()
            seen.append((values, gradients(model)))
        assert vars(model) == before
        (fused, learned), (unfused, expected) = seen
        assert all(_close(actual, value) for actual, value in zip(fused, unfused, strict=True))
        assert any(name.startswith("mtp.") and gradient.any() for name, gradient in learned.items())
        assert_same_gradients(learned, expected, 2e-6)


@pytest.mark.since("mtp")
def test_mtp_is_trained_on_real_tokens_only():
    """L6: the MTP loss mask holds 1 at counted labels, so more padding changes no MTP gradient.

    Older releases (0.12, 0.13) refuse MTP with packed batches themselves; then that refusal is what comes out.
    """
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    model, nested = build(Shape(packed=True, mtp=1)).train(), Rows.of(97, (5, 3), 9).nested
    refusal = _packed_mtp_refusal(model, nested)
    if refusal:
        assert "sequence packing is not yet supported" in refusal
        with pytest.raises(AssertionError, match="sequence packing is not yet supported"):
            fused_forward_no_padding_gen()(model, nested, nested, {}, 1.0, True, 0)
        assert "forward" not in vars(model)
        return
    seen = []
    for bucket in (None, 32):
        output = fused_forward_no_padding_gen()(model, nested, nested, {}, 1.0, True, 0, pad_to_length_bucket=bucket)
        output["log_probs"].values().sum().backward()
        seen.append(gradients(model))
    assert any(name.startswith("mtp.") for name in seen[0])
    assert_same_gradients(*seen, TOLERANCE)
