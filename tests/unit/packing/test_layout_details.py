"""What mutation testing of the packing found unlooked at: moves between devices, dtypes, names in messages."""

import pytest
import torch

from mcore_fused.errors import CallArgumentError, PackingError
from mcore_fused.packing import PackingLayout, PackingSettings

MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)


def jagged(*rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.mark.parametrize(
    "layout", [PackingLayout.from_mask(MASK), PackingLayout.from_lengths([2, 3], cp_size=2)], ids=["padded", "jagged"]
)
def test_a_moved_layout_is_the_same_layout(layout):
    """Its container too: what it packs and unpacks afterwards is what it did before."""
    moved = layout.to("cpu")
    assert (moved.container.kind, moved.container.rows, moved.container.width, moved.tokens) == (
        layout.container.kind, layout.container.rows, layout.container.width, layout.tokens,
    )  # fmt: skip
    source = torch.arange(8).reshape(2, 4) if layout.container.kind == "padded" else torch.arange(5)
    ranks = range(layout.settings.cp_size)
    packed = [moved.for_rank(rank).pack(source) for rank in ranks]
    assert all(torch.equal(packed[rank], layout.for_rank(rank).pack(source)) for rank in ranks)
    back, expected = moved.unpack_ranks(packed), layout.unpack_ranks(packed)
    if layout.container.kind == "padded":
        assert torch.equal(back, expected)
        assert torch.equal(back, torch.where(MASK, source, 0))
    else:
        assert torch.equal(back.values(), expected.values())
        assert torch.equal(back.offsets(), expected.offsets())


def test_a_layout_moves_with_all_its_tensors():
    moved = PackingLayout.from_mask(MASK).to("meta")
    tensors = [moved.cu_seqlens, moved.cu_seqlens_padded, moved.container.offsets, moved.container.positions]
    tensors += list(vars(moved.slots).values())
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_layout_is_made_where_it_is_asked_for():
    assert PackingLayout.from_lengths([2, 3], device="meta").device.type == "meta"
    assert PackingLayout.from_lengths(torch.tensor([2, 3]), device="meta").device.type == "meta"
    assert PackingLayout.from_lengths(torch.tensor([2, 3])).device.type == "cpu"


def test_one_row_has_two_boundaries_and_fewer_are_refused():
    layout = PackingLayout.from_boundaries(torch.tensor([0, 5]))
    assert layout.lengths == (5,)
    assert layout.container.rows == 1
    assert PackingLayout.from_boundaries(torch.tensor([[0, 5]])).lengths == (5,)
    for wrong in (torch.tensor([0]), torch.tensor(0), torch.zeros(1, 1, 2, dtype=torch.int64)):
        with pytest.raises(PackingError, match=r"cu_seqlens has the shape .*pass \[n \+ 1\]"):
            PackingLayout.from_boundaries(wrong)
    with pytest.raises(PackingError, match=r"cu_seqlens does not start at 0.*cumulative lengths"):
        PackingLayout.from_boundaries(torch.tensor([1, 5]))


@pytest.mark.parametrize(
    ("given", "packed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_temperatures_are_at_least_fp32(given, packed):
    layout = PackingLayout.from_lengths([2, 3])
    for temperature in (torch.tensor(0.5), torch.tensor([0.5, 2.0]), jagged([0.5, 0.5], [2.0, 2.0, 2.0])):
        result = layout.pack_temperature(temperature.to(given))
        assert result.dtype is packed
        assert result.tolist()[0][0] == 0.5


def test_a_message_names_the_tensor_that_does_not_fit():
    layout = PackingLayout.from_mask(MASK)
    wrong = torch.ones(3, 4)
    with pytest.raises(PackingError, match=r"^ids is"):
        layout.pack_ids(wrong.long())
    with pytest.raises(PackingError, match=r"^labels is"):
        layout.pack_labels(wrong.long())
    with pytest.raises(PackingError, match=r"^labels mask is"):
        layout.pack_labels(torch.ones(2, 4, dtype=torch.int64), mask=wrong)
    with pytest.raises(PackingError, match=r"^temperature is"):
        layout.pack_temperature(wrong)
    with pytest.raises(PackingError, match=r"^source is"):
        layout.pack(wrong)
    with pytest.raises(PackingError, match=r"^the nested tensor is not a jagged"):
        PackingLayout.from_nested(wrong)
    rows = PackingLayout.from_lengths([2, 1])
    with pytest.raises(PackingError, match=r"^ids has other row lengths than the layout"):
        rows.pack_ids(jagged([1], [2, 3]))


def test_offsets_are_what_jagged_tensors_have():
    for layout in (PackingLayout.from_lengths([2, 1]), PackingLayout.from_mask(MASK)):
        assert layout.container.offsets.dtype is torch.int64
    assert PackingLayout.from_lengths([2, 1]).cu_seqlens.dtype is torch.int32


def test_any_number_but_zero_marks_a_real_token():
    """Masks come as bool, as integers, as segment numbers and as floats; lengths are counts in all of them."""
    expected = PackingLayout.from_mask(MASK)
    for mask in (MASK.long(), MASK.long() * 3, MASK.float() * 0.5, MASK.to(torch.uint8)):
        layout = PackingLayout.from_mask(mask)
        assert layout.lengths == expected.lengths
        assert all(type(length) is int for length in layout.lengths)
        assert torch.equal(layout.container.positions, expected.container.positions)


def test_a_container_knows_its_rows():
    assert PackingLayout.from_nested(jagged([1, 2], [3])).container.rows == 2
    assert PackingLayout.from_lengths([2, 0, 1]).container.rows == 3
    assert PackingLayout.from_mask(MASK).container.rows == 2


def test_unpacking_without_the_group_says_which_is_wanted():
    layout = PackingLayout.from_lengths([4], cp_size=2)
    with pytest.raises(PackingError, match="the group is none") as refusal:
        layout.unpack(torch.zeros(1, layout.local_tokens))
    assert refusal.value.next_step == "pass the context-parallel group the layout was made for."


def test_a_bad_temperature_at_padding_of_a_dense_batch_is_none():
    layout = PackingLayout.from_mask(MASK)
    at_padding = torch.where(MASK, 0.5, float("nan"))
    assert layout.pack_temperature(at_padding).tolist() == [[0.5] * 5]
    with pytest.raises(CallArgumentError):
        layout.pack_temperature(torch.where(MASK, float("nan"), 0.5))


def test_padding_holds_what_was_asked_for():
    layout = PackingLayout.from_lengths([3, 2], pad_to_length_bucket=4)
    ids = torch.arange(1, 6)
    assert layout.pack(ids).tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert layout.pack(ids, 9).tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert layout.pack_ids(ids).tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert layout.pack_ids(ids, 7).tolist() == [[1, 2, 3, 4, 5, 7, 7, 7]]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_outputs_without_a_batch_dimension_unpack_alike(cp_size):
    layouts = [PackingLayout.from_lengths([5, 2], cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    packed = [layout.pack(torch.arange(7)) for layout in layouts]
    flat = [shard[0] for shard in packed]
    assert torch.equal(layouts[0].unpack_ranks(flat).values(), torch.arange(7))
    assert torch.equal(layouts[0].unpack_ranks(packed).values(), torch.arange(7))


def test_a_batch_without_tokens_packs_any_shape_and_keeps_its_graph():
    layout = PackingLayout.from_lengths([0, 0], min_local_rows=2)
    source = torch.zeros(0, 3, 2, requires_grad=True)
    packed = layout.pack(source, 4.0)
    assert packed.shape == (1, layout.local_tokens, 3, 2)
    assert bool((packed == 4.0).all())
    packed.sum().backward()
    assert source.grad.shape == (0, 3, 2)


def test_a_padded_batch_counts_its_real_tokens():
    assert PackingLayout.from_mask(MASK).tokens == 5
    assert PackingLayout.from_mask(MASK).container.width == 4


def test_a_message_shows_the_shape_or_says_nested():
    nested = jagged([1, 2], [3, 4, 5])
    layout = PackingLayout.from_mask(MASK)
    with pytest.raises(PackingError, match=r"^source is \[3, 4\], the layout was made from a mask \[2, 4\]"):
        layout.pack(torch.ones(3, 4))
    with pytest.raises(PackingError, match=r"^source is nested,"):
        layout.pack(nested)
    with pytest.raises(PackingError, match=r"^the packed output is \[1, 2\], this rank holds 5 slots"):
        layout.unpack(torch.ones(1, 2))
    with pytest.raises(PackingError, match=r"^the packed output is nested,"):
        layout.unpack(nested)


def test_nothing_is_padded_unless_asked_for():
    assert PackingLayout.from_lengths([1]).local_tokens == 1
    assert PackingLayout.from_lengths([1]).settings == PackingSettings()


def test_shards_are_gathered_into_contiguous_memory(monkeypatch):
    """A collective takes its buffers as flat memory, whatever the strides of the output that is gathered."""
    layout = PackingLayout.from_lengths([4], cp_size=2)
    output = torch.arange(4.0).reshape(2, 2).T.unsqueeze(0)
    assert not output[0].is_contiguous()

    class Group:
        @staticmethod
        def size():
            return 2

    def all_gather(outputs, local, group):
        assert local.is_contiguous()
        assert all(buffer.is_contiguous() for buffer in outputs)
        for buffer in outputs:
            buffer.copy_(local)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    assert layout.unpack(output, Group()).values().shape == (4, 2)
