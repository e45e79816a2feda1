"""Packing against the naive reference, every rank simulated in this process."""

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from naive_packing import BLOCK, packed, padded_rows, row_lengths, setups, slots_of_ranks

from mcore_fused.packing import PackingLayout, PackingSettings

IGNORED = -100


def ranks_of(lengths, setup):
    return [PackingLayout.from_lengths(lengths, cp_rank=rank, **setup) for rank in range(setup["cp_size"])]


def rows_of(lengths):
    """Every token of the batch is a different number, never 0, so that no mix-up can cancel out."""
    numbers = iter(range(1, sum(lengths) + 1))
    return [[next(numbers) for _ in range(length)] for length in lengths]


def jagged(rows, dtype=torch.int64):
    flat = torch.tensor([number for row in rows for number in row], dtype=dtype)
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    return torch.nested.nested_tensor_from_jagged(flat, offsets)


@st.composite
def masked_batches(draw):
    """Row lengths and a mask [rows, width] with left, right and interior padding."""
    lengths = draw(row_lengths(max_rows=4, max_length=9))
    width = max(lengths) + draw(st.integers(0, 4))
    columns = [sorted(draw(st.permutations(range(width)))[:length]) for length in lengths]
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, chosen in enumerate(columns):
        mask[row, chosen] = True
    return lengths, mask


@given(lengths=row_lengths(), setup=setups())
@settings(max_examples=120, deadline=None)
def test_boundaries_and_slots_equal_the_naive_reference(lengths, setup):
    """L2 (rows of 0, 1 and fewer tokens than the alignment), L3, L4: padded and real boundaries, alignment."""
    padded = padded_rows(lengths, setup)
    reals = [*lengths, *[0] * (len(padded) - len(lengths))]
    for rank, layout in enumerate(ranks_of(lengths, setup)):
        assert list(layout.padded_lengths) == padded
        assert layout.cu_seqlens_padded.tolist() == [sum(padded[:end]) for end in range(len(padded) + 1)]
        assert layout.cu_seqlens.tolist() == [sum(reals[:end]) for end in range(len(padded) + 1)]
        assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == torch.int32
        slots = slots_of_ranks(padded, setup)[rank]
        assert layout.local_tokens == len(slots) >= setup["min_local_rows"]
        real = [position < reals[row] for row, position in slots]
        assert layout.padding_mask[0].tolist() == [not is_real for is_real in real]
        expected = [position if is_real else 0 for (_, position), is_real in zip(slots, real, strict=True)]
        assert layout.position_ids[0].tolist() == expected


@given(lengths=row_lengths(), setup=setups(max_cp=8))
@settings(max_examples=60, deadline=None)
def test_alignment_holds_for_every_rank_local_shard(lengths, setup):
    """L4: the block divides what one rank multiplies, after context- and sequence-parallel splits."""
    layout = PackingLayout.from_lengths(lengths, **setup)
    shards = setup["tp_size"] if setup["sequence_parallel"] else 1
    assert layout.total_tokens % (setup["cp_size"] * shards) == 0
    assert (layout.local_tokens // shards) % BLOCK[setup["fp8_recipe"]] == 0
    assert layout.total_tokens % setup["pad_to_length_bucket"] == 0
    assert layout.total_tokens > 0


@given(lengths=row_lengths(), setup=setups())
@settings(max_examples=80, deadline=None)
def test_ids_and_labels_equal_the_naive_reference(lengths, setup):
    """L1: labels shift inside their row; L2 and L9: labels lie in the slots of their ids, on every rank."""
    rows = rows_of(lengths)
    shifted = [[*row[1:], IGNORED] if row else [] for row in rows]
    source = jagged(rows)
    slots = slots_of_ranks(padded_rows(lengths, setup), setup)
    for rank, layout in enumerate(ranks_of(lengths, setup)):
        assert layout.pack_ids(source, pad_token_id=0)[0].tolist() == packed(rows, slots[rank], 0)
        assert layout.pack_labels(source)[0].tolist() == packed(shifted, slots[rank], IGNORED)
        assert layout.pack_labels(source, shift=False)[0].tolist() == packed(rows, slots[rank], IGNORED)


@given(lengths=row_lengths(), setup=setups())
@settings(max_examples=60, deadline=None)
def test_labels_never_cross_a_row(lengths, setup):
    """L1: whatever the layout, the label of a slot is the next token of that slot's own row, or ignored."""
    owner = {number: index for index, row in enumerate(rows_of(lengths)) for number in row}
    source = jagged(rows_of(lengths))
    seen = 0
    for layout in ranks_of(lengths, setup):
        for token, label in zip(
            layout.pack_ids(source)[0].tolist(), layout.pack_labels(source)[0].tolist(), strict=True
        ):
            if label != IGNORED:
                seen += 1
                assert label == token + 1
                assert owner[label] == owner[token]
    assert seen == sum(max(length - 1, 0) for length in lengths)


@given(
    lengths=row_lengths(),
    setup=setups(),
    trailing=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.bool]),
)
@settings(max_examples=80, deadline=None)
def test_round_trip_of_jagged_batches_is_the_identity(lengths, setup, trailing, dtype):
    """L5, L7: pack on every rank, unpack once: same values, dtype, offsets; any trailing dimensions."""
    values = torch.arange(sum(lengths) * torch.Size(trailing).numel()).reshape(-1, *trailing).to(dtype)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    source = torch.nested.nested_tensor_from_jagged(values, offsets)
    layouts = [
        PackingLayout.from_nested(source, PackingSettings(cp_rank=rank, **setup)) for rank in range(setup["cp_size"])
    ]
    result = layouts[0].unpack_ranks([layout.pack(source) for layout in layouts])
    assert result.layout == torch.jagged
    assert result.offsets() is source.offsets()
    assert result.dtype == dtype
    assert torch.equal(result.values(), values)


@given(batch=masked_batches(), setup=setups(), trailing=st.sampled_from([(), (2,)]))
@settings(max_examples=80, deadline=None)
def test_round_trip_of_padded_batches_is_the_identity(batch, setup, trailing):
    """L10: padding on the left, on the right and in between comes back where it was, as 0; nothing real is lost."""
    _, mask = batch
    source = 1 + torch.arange(mask.numel() * torch.Size(trailing).numel()).reshape(*mask.shape, *trailing)
    layouts = [PackingLayout.from_mask(mask, PackingSettings(cp_rank=r, **setup)) for r in range(setup["cp_size"])]
    result = layouts[0].unpack_ranks([layout.pack(source, pad_value=-7) for layout in layouts])
    keep = mask.reshape(*mask.shape, *(1 for _ in trailing))
    assert torch.equal(result, source * keep)


@given(batch=masked_batches(), setup=setups())
@settings(max_examples=60, deadline=None)
def test_masks_and_lengths_lay_out_alike(batch, setup):
    """A padded batch packs exactly as its rows without padding do, labels with their mask included."""
    lengths, mask = batch
    dense = torch.arange(1, mask.numel() + 1).reshape(mask.shape)
    counts = dense % 3 > 0
    rows = [dense[row][mask[row]].tolist() for row in range(len(lengths))]
    kept = [dense[row][mask[row]].where(counts[row][mask[row]], IGNORED).tolist() for row in range(len(lengths))]
    for rank in range(setup["cp_size"]):
        flat = PackingLayout.from_lengths(lengths, cp_rank=rank, **setup)
        padded = PackingLayout.from_mask(mask, PackingSettings(cp_rank=rank, **setup))
        assert torch.equal(padded.pack_ids(dense), flat.pack_ids(jagged(rows)))
        assert torch.equal(padded.pack_labels(dense), flat.pack_labels(jagged(rows)))
        for shift in (True, False):
            masked = padded.pack_labels(dense, mask=counts, shift=shift)
            assert torch.equal(masked, flat.pack_labels(jagged(kept), shift=shift))


@given(lengths=row_lengths(), setup=setups())
@settings(max_examples=60, deadline=None)
def test_padding_is_neutral(lengths, setup):
    """L6: however much padding there is, real tokens give the same values and gradients, padding gives none."""
    weights = torch.arange(1.0, sum(lengths) + 1)
    plain = PackingLayout.from_lengths(lengths)
    results, gradients = [], []
    for layouts in ([plain], ranks_of(lengths, setup)):
        source = torch.linspace(1.0, 2.0, sum(lengths)).requires_grad_()
        outputs = [layout.pack(source).square() for layout in layouts]
        result = layouts[0].unpack_ranks(outputs).values()
        results.append(result.detach())
        (gradient,) = torch.autograd.grad((result * weights).sum(), source)
        gradients.append(gradient)
        for layout, output in zip(layouts, outputs, strict=True):
            assert output[layout.padding_mask].abs().sum() == 0
    assert torch.equal(*results)
    assert torch.equal(*gradients)


@given(lengths=row_lengths(), setup=setups(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_temperature_lies_where_the_labels_lie(lengths, setup, data):
    """K7: one value for each row or token is packed, padded and split as the labels are; padding divides by 1."""
    per_row = torch.tensor(data.draw(st.lists(st.floats(0.25, 4.0), min_size=len(lengths), max_size=len(lengths))))
    per_token = jagged([[per_row[row].item()] * length for row, length in enumerate(lengths)], torch.float32)
    slots = slots_of_ranks(padded_rows(lengths, setup), setup)
    for rank, layout in enumerate(ranks_of(lengths, setup)):
        expected = packed([[per_row[row].item()] * length for row, length in enumerate(lengths)], slots[rank], 1.0)
        assert layout.pack_temperature(per_row)[0].tolist() == expected
        assert layout.pack_temperature(per_token)[0].tolist() == expected
        assert layout.pack_temperature(per_row).dtype == torch.float32
        assert layout.pack_temperature(per_row).shape == layout.pack_labels(per_token.values().long()).shape


@given(lengths=row_lengths(), setup=setups())
@settings(max_examples=20, deadline=None)
def test_for_rank_copies_and_pickles_are_the_same_layout(lengths, setup):
    source = torch.arange(sum(lengths))
    first = PackingLayout.from_lengths(lengths, **setup)
    for rank, layout in enumerate(ranks_of(lengths, setup)):
        for other in (
            first.for_rank(rank),
            copy.deepcopy(layout),
            pickle.loads(pickle.dumps(layout)),
            layout.to("cpu"),
        ):
            assert other.settings == layout.settings
            assert torch.equal(other.pack_ids(source), layout.pack_ids(source))
    with pytest.raises(AttributeError):
        first.lengths = (1,)
