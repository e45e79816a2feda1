"""The published examples of packing bugs, one test each, and every refusal."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_fused.errors import CallArgumentError, CallTypeError, MCoreFusedError, PackingError
from mcore_fused.packing import FP8_ROW_MULTIPLES, PackingLayout, PackingSettings
from mcore_fused.packing import layout as layout_module

IGNORED = -100


def test_l1_labels_of_packed_rows_do_not_roll_into_each_other():
    """L1: rows of 3 and 2 tokens; a flat roll would give 21 to the last slot of the first row."""
    labels = torch.tensor([11, 12, 13, 21, 22])
    assert PackingLayout.from_lengths([3, 2]).pack_labels(labels).tolist() == [[12, 13, IGNORED, 22, IGNORED]]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_l2_a_row_shorter_than_the_alignment_reaches_every_rank(length):
    """L2: CP = 8, TP = 2, three tokens: most ranks hold padding only, and none fails."""
    layouts = [
        PackingLayout.from_lengths([length], cp_size=8, cp_rank=rank, tp_size=2, sequence_parallel=True)
        for rank in range(8)
    ]
    tokens = torch.arange(100, 100 + length)
    packed = [layout.pack_ids(tokens) for layout in layouts]
    assert {ids.shape for ids in packed} == {(1, 4)}
    assert sum((ids >= 100).sum().item() for ids in packed) == length
    assert layouts[0].unpack_ranks(packed).values().tolist() == tokens.tolist()


def test_l3_validity_follows_real_boundaries_and_chunks_follow_padded_ones():
    """L3: 7 real tokens in 8 slots; after one left shift six labels count, then 0, 0; whatever the rank count."""
    for cp_size in (1, 2, 4):
        layouts = [PackingLayout.from_lengths([7], cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
        row = torch.arange(7)
        counted = torch.zeros(8, dtype=torch.long)
        for rank, layout in enumerate(layouts):
            size = 8 // (2 * cp_size)
            chunks = [rank, 2 * cp_size - 1 - rank] if cp_size > 1 else [0, 1]
            slots = torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])[
                : layout.local_tokens
            ]
            counted[slots] = (layout.pack_labels(row)[0] != IGNORED).long()
        assert counted.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
        assert layouts[0].cu_seqlens.tolist() == [0, 7]
        assert layouts[0].cu_seqlens_padded.tolist() == ([0, 7] if cp_size == 1 else [0, 8])


def test_l4_the_shard_is_aligned_and_not_only_the_whole():
    """L4: TP = 2, CP = 2, a row of 8; a global 16 would leave 4 rows to each rank."""
    for recipe, block in FP8_ROW_MULTIPLES.items():
        layout = PackingLayout.from_lengths([8], cp_size=2, tp_size=2, sequence_parallel=True, fp8_recipe=recipe)
        assert layout.local_tokens // 2 == block
    assert dict(FP8_ROW_MULTIPLES) == {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def test_l5_a_result_of_another_layout_is_refused():
    """L5: packed for one multiple, unpacked for another."""
    packed = PackingLayout.from_lengths([5, 3], fp8_recipe="delayed").pack_ids(torch.arange(8))
    with pytest.raises(PackingError, match="this rank holds 8 slots"):
        PackingLayout.from_lengths([5, 3]).unpack(packed)
    with pytest.raises(PackingError, match="1 outputs for 2 ranks"):
        PackingLayout.from_lengths([5, 3], cp_size=2).unpack_ranks([packed])
    with pytest.raises(PackingError, match="the group is none"):
        PackingLayout.from_lengths([5, 3], cp_size=2).unpack(packed)
    with pytest.raises(PackingError, match="other row lengths"):
        PackingLayout.from_lengths([5, 3]).pack_ids(
            torch.nested.nested_tensor_from_jagged(torch.arange(8), torch.tensor([0, 4, 8]))
        )


def test_l6_what_the_whole_needs_does_not_lengthen_a_real_row():
    """L6: FP8 padding goes into a row of its own; the real rows' boundaries and the longest row stay."""
    layout = PackingLayout.from_lengths([5, 3], fp8_recipe="delayed")
    assert layout.cu_seqlens.tolist() == [0, 5, 8, 8]
    assert layout.cu_seqlens_padded.tolist() == [0, 5, 8, 16]
    assert layout.padding_mask[0].tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("rows", [[4], [4, 2]])
def test_l7_results_come_back_in_the_container_they_came_in(rows):
    """L7: one row or several, jagged stays jagged with the same offsets, so that it combines with its inputs."""
    source = torch.nested.nested_tensor([torch.ones(length) for length in rows], layout=torch.jagged)
    layout = PackingLayout.from_nested(source, PackingSettings(pad_to_length_bucket=16))
    result = layout.unpack(layout.pack(source))
    assert result.is_nested
    assert result.shape == source.shape
    assert (result * source).values().tolist() == [1.0] * sum(rows)
    mask = torch.ones(len(rows), 4, dtype=torch.bool)
    padded = PackingLayout.from_mask(mask)
    assert padded.unpack(padded.pack(torch.ones(mask.shape))).shape == mask.shape


def test_l8_every_samples_boundaries_count_and_sentinels_are_empty_rows():
    """L8: a micro-batch of two, constant-size boundary arrays with repeated last entries."""
    layout = PackingLayout.from_boundaries(torch.tensor([[0, 3, 5, 5, 5], [0, 1, 2, 5, 5]]))
    assert layout.lengths == (3, 2, 0, 0, 1, 1, 3, 0)
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 5, 5, 6, 7, 10, 10]
    flat = PackingLayout.from_boundaries(torch.tensor([0, 3, 5, 5]))
    assert flat.pack_labels(torch.arange(1, 6)).tolist() == [[2, 3, IGNORED, 5, IGNORED]]
    for wrong in (torch.tensor([1, 3]), torch.tensor([0, 3, 2]), torch.tensor([0]), torch.tensor(0)):
        with pytest.raises(PackingError):
            PackingLayout.from_boundaries(wrong)


def test_l9_labels_of_another_count_than_the_slots_are_refused():
    """L9: hidden rows and labels must be split alike."""
    layout = PackingLayout.from_lengths([4, 4], cp_size=2)
    for wrong in (torch.zeros(1, 8), torch.zeros(2, 4), torch.zeros(8), torch.zeros(4, 1)):
        with pytest.raises(PackingError, match="this rank holds 4 slots"):
            layout.unpack_ranks([wrong, wrong])
    with pytest.raises(PackingError, match="the layout holds 8 tokens"):
        layout.pack_labels(torch.zeros(4, dtype=torch.long))


def test_l10_padding_in_the_interior_is_not_taken_for_a_tail():
    """L10: rows of 3 and 2, each padded to 4; a prefix of five slots would lose a real token."""
    layouts = [PackingLayout.from_lengths([3, 2], cp_size=2, cp_rank=rank) for rank in range(2)]
    assert layouts[0].cu_seqlens_padded.tolist() == [0, 4, 8]
    values = torch.tensor([11, 12, 13, 21, 22])
    packed = [layout.pack(values) for layout in layouts]
    assert [shard.tolist() for shard in packed] == [[[11, 0, 21, 0]], [[12, 13, 22, 0]]]
    assert layouts[0].unpack_ranks(packed).values().tolist() == values.tolist()


def test_k6_a_temperature_that_cannot_be_is_refused_but_padding_may_hold_anything():
    """K6, K7: 0, negative, NaN and infinite are refused at real tokens; fill values of padding are not read."""
    mask = torch.tensor([[True, True, False]])
    layout = PackingLayout.from_mask(mask)
    assert layout.pack_temperature(torch.tensor([[0.5, 2.0, 0.0]])).tolist() == [[0.5, 2.0]]
    assert layout.pack_temperature(torch.tensor(0.5)).tolist() == [[0.5, 0.5]]
    assert layout.pack_temperature(0.5) == 0.5
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        for temperature in (wrong, torch.tensor(wrong), torch.tensor([wrong]), torch.tensor([[1.0, wrong, 1.0]])):
            with pytest.raises(CallArgumentError):
                layout.pack_temperature(temperature)
    with pytest.raises(CallTypeError):
        layout.pack_temperature(torch.tensor([1]))
    with pytest.raises(PackingError, match="trailing dimensions"):
        layout.pack_temperature(torch.ones(1, 3, 2))
    with pytest.raises(PackingError, match="for 1 rows"):
        layout.pack_temperature(torch.ones(2))


def test_all_ranks_refuse_a_temperature_together():
    """A rank that holds only good values must not go on into a collective that the others never enter."""
    for rank in range(2):
        layout = PackingLayout.from_lengths([4, 4], cp_size=2, cp_rank=rank, cp_layout="contiguous")
        with pytest.raises(CallArgumentError):
            layout.pack_temperature(torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cp_size": 0},
        {"cp_size": True},
        {"tp_size": 1.5},
        {"cp_rank": 1},
        {"cp_rank": -1},
        {"cp_layout": "striped"},
        {"fp8_recipe": "custom"},
        {"min_local_rows": 0},
        {"pad_to_length_bucket": -4},
    ],
)
def test_impossible_settings_are_refused(wrong):
    """L4: an unknown FP8 recipe has no alignment to fall back on."""
    with pytest.raises(PackingError) as refusal:
        PackingLayout.from_lengths([1], **wrong)
    assert isinstance(refusal.value, MCoreFusedError)
    assert next(iter(wrong)) in refusal.value.problem


def test_impossible_rows_are_refused():
    for rows in ([], [3, -1], torch.tensor([-1])):
        with pytest.raises(PackingError):
            PackingLayout.from_lengths(rows)
    with pytest.raises(PackingError, match="int32"):
        PackingLayout.from_lengths([2**31])


def test_tensors_of_another_container_or_device_are_refused():
    layout = PackingLayout.from_mask(torch.ones(2, 3, dtype=torch.bool))
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.jagged)
    for wrong in (torch.zeros(3, 2), torch.zeros(6), nested):
        with pytest.raises(PackingError, match="made from a mask"):
            layout.pack(wrong)
    with pytest.raises(PackingError, match="on meta"):
        layout.pack(torch.zeros(2, 3, device="meta"))
    with pytest.raises(PackingError, match="not a jagged nested tensor"):
        PackingLayout.from_nested(torch.zeros(2, 3))
    with pytest.raises(PackingError, match="ragged in another dimension"):
        PackingLayout.from_nested(
            torch.nested.nested_tensor([torch.ones(2, 3)] * 2, layout=torch.jagged).transpose(1, 2)
        )
    for wrong in (nested, torch.ones(3)):
        with pytest.raises(PackingError, match="dense"):
            PackingLayout.from_mask(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the strided layout is a prototype
        strided = torch.nested.nested_tensor([torch.ones(2)])
    with pytest.raises(PackingError, match="jagged"):
        PackingLayout.from_nested(strided)


def test_nested_tensors_with_holes_are_read_by_their_lengths():
    """A narrowed jagged tensor keeps the values between its rows; they are no tokens."""
    narrowed = torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([1, 0, 2]), torch.tensor([2, 3, 2]), layout=torch.jagged
    )
    layout = PackingLayout.from_nested(narrowed)
    assert layout.lengths == (2, 3, 2)
    assert layout.pack_ids(narrowed).tolist() == [[1, 2, 4, 5, 6, 10, 11]]


def test_integer_masks_are_masks():
    layout = PackingLayout.from_mask(torch.tensor([[0, 1, 1]]))
    labels = torch.tensor([[7, 8, 9]])
    assert layout.pack_labels(labels, shift=False, mask=torch.tensor([[0, 0, 1]])).tolist() == [[IGNORED, 9]]


class _Operations(TorchDispatchMode):
    """Names of all operations that reach the device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "setup", [{}, {"cp_size": 2}, {"cp_size": 2, "cp_layout": "contiguous", "fp8_recipe": "mxfp8"}]
)
def test_work_does_not_grow_with_the_rows_and_never_waits_for_the_device(setup):
    """Four rows or four hundred: the same operations, none of which brings a number to the host."""

    def operations(rows):
        source = torch.arange(3 * rows)
        with _Operations() as seen:
            layout = PackingLayout.from_lengths([3] * rows, **setup)
            layout.pack_ids(source)
            layout.pack_labels(source)
            packed = [layout.for_rank(rank).pack(source) for rank in range(layout.settings.cp_size)]
            layout.unpack_ranks(packed)
        return seen.names

    few, many = operations(4), operations(400)
    assert few == many
    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::item", "aten::is_nonzero"}
    assert not waits & set(many)


class _Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


@pytest.mark.parametrize("trailing", [(), (2,)])
@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
def test_gathering_gives_every_rank_the_batch_and_counts_each_gradient_once(monkeypatch, cp_layout, trailing):
    """Summed over the ranks, as Megatron sums gradients, the gradient is that of one rank with everything."""
    lengths, shape = [5, 0, 2], (7, *trailing)
    weights = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
    layouts = [PackingLayout.from_lengths(lengths, cp_size=2, cp_rank=rank, cp_layout=cp_layout) for rank in range(2)]
    source = torch.linspace(1.0, 2.0, weights.numel()).reshape(shape).requires_grad_()
    shards = [layout.pack(source) for layout in layouts]

    def all_gather(outputs, local, group):
        assert not local.requires_grad
        assert group.size() == 2
        for output, shard in zip(outputs, shards, strict=True):
            output.copy_(shard[0].detach())

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    total = torch.zeros(shape)
    for layout, shard in zip(layouts, shards, strict=True):
        result = layout.unpack(shard, _Group(2))
        assert torch.equal(result.values(), source)
        (gradient,) = torch.autograd.grad((result.values() * weights).sum(), source, retain_graph=True)
        total += gradient
    assert torch.equal(total, weights)
    with pytest.raises(PackingError, match="the group is one of 3"):
        layouts[0].unpack(shards[0], _Group(3))


def test_the_ignore_index_is_megatrons():
    assert layout_module.IGNORE_INDEX == IGNORED
