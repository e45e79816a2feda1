"""Packed batches through the real model: rows packed together are the rows run alone, whatever padding lies between.

Error analysis: packed and alone the model does the same float64 sums over the same tokens, in another order inside
attention. With unit roundoff 2^-53, sums of at most a few hundred terms and logits below a few hundred, outputs
agree to about 1e-11; 1e-9 leaves room for the depth of the model, and is far below any wrong pairing.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import DEVICE, Shape, build, shared
from support.models.packed import Rows, rows_alone

from mcore_compat.testing.reference import assert_same_gradients, gradients

pytestmark = pytest.mark.needs("factories", "float64")

TOLERANCE = 1e-9

lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=1, max_size=4).filter(any)
shapes = st.builds(Shape, tied=st.booleans(), packed=st.just(True))


def _temperatures(rows):
    return torch.tensor([(0.5, 2.0, 0.9, 1.0)[row % 4] for row in range(rows)], dtype=torch.float64, device=DEVICE)


def _jagged(model, rows, **options):
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    temperatures = _temperatures(len(rows.ids))
    return fused_forward_no_padding_gen()(model, rows.nested, rows.nested, {}, temperatures, True, 0, **options)


def _assert_close(actual, expected):
    assert actual.shape == expected.shape
    if actual.numel():
        assert (actual.double() - expected).abs().max().item() <= TOLERANCE


@given(shape=shapes, lengths=lengths, bucket=st.sampled_from([None, 1, 16]), seed=st.integers(0, 1000))
@settings(max_examples=8)
def test_packed_rows_equal_rows_alone(shape, lengths, bucket, seed):
    """L1, L2, L6, K7, M8: unequal lengths, a temperature for each row, padding between rows and after them."""
    model, rows = shared(shape), Rows.of(shape.vocab, lengths, seed)
    with torch.no_grad():
        output = _jagged(model, rows, pad_to_length_bucket=bucket)
        expected = rows_alone(model, rows, _temperatures(len(lengths)))
    for name, part in (("log_probs", 0), ("entropy", 1)):
        for actual, pair in zip(output[name].unbind(), expected, strict=True):
            _assert_close(actual, pair[part])


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_packed_rows_equal_those_of_rows_alone(tied):
    """L6, K4, K16: padding gives no gradient; every token has its own weight in both outputs."""
    shape = Shape(tied=tied, packed=True)
    model, rows = shared(shape), Rows.of(shape.vocab, (5, 1, 7), 3)
    weights = torch.linspace(-1, 2, 26, dtype=torch.float64, device=DEVICE).reshape(2, 13)
    output = _jagged(model, rows, pad_to_length_bucket=32)
    (weights[0] * output["log_probs"].values() + weights[1] * output["entropy"].values()).sum().backward()
    actual = gradients(model)
    alone = [torch.cat(parts) for parts in zip(*rows_alone(model, rows, _temperatures(3)), strict=True)]
    (weights[0] * alone[0] + weights[1] * alone[1]).sum().backward()
    assert_same_gradients(actual, gradients(model), TOLERANCE)


def test_extra_padding_changes_neither_loss_nor_gradient():
    """L6: the same batch with and without 51 slots of padding."""
    model, rows = shared(Shape(packed=True)), Rows.of(97, (5, 1, 7), 4)
    seen = []
    for bucket in (None, 64):
        output = _jagged(model, rows, pad_to_length_bucket=bucket)
        output["log_probs"].values().sum().backward()
        seen.append((output["log_probs"].values().detach(), gradients(model)))
    _assert_close(seen[0][0], seen[1][0])
    assert_same_gradients(seen[0][1], seen[1][1], TOLERANCE)


@pytest.mark.parametrize("boundaries", ["padded", "real"])
def test_packed_seq_params_hold_both_boundaries_in_every_release(boundaries):
    """L3: physical boundaries where Megatron looks for slots; only fields that this release has are set."""
    from mcore_fused.packing import PackingLayout, PackingSettings, layout_of, packed_seq_params

    layout = PackingLayout.from_lengths([5, 3], fp8_recipe="delayed", device=DEVICE)
    params = packed_seq_params(layout, boundaries=boundaries)
    assert params.qkv_format == "thd"
    expected = [0, 5, 8, 16] if boundaries == "padded" else [0, 5, 8, 8]
    for side in ("q", "kv"):
        assert getattr(params, f"cu_seqlens_{side}").tolist() == expected
        assert getattr(params, f"cu_seqlens_{side}_padded").tolist() == [0, 5, 8, 16]
        assert getattr(params, f"max_seqlen_{side}") == 8
    assert layout_of(params) is layout
    names = {field.name for field in dataclasses.fields(params)}
    if "pad_between_seqs" in names:
        assert params.pad_between_seqs is (boundaries == "real")
    if "total_tokens" in names:
        assert params.seq_idx.tolist() == [[0] * 5 + [1] * 3 + [2] * 8]
    plain = PackingLayout.from_nested(
        torch.nested.nested_tensor([torch.ones(4)], layout=torch.jagged), PackingSettings()
    )
    assert packed_seq_params(plain, boundaries="real").cu_seqlens_q.tolist() == [0, 4]


def test_real_boundaries_give_the_same_result(monkeypatch):
    """L3, L6: a kernel that follows the physical boundaries gives the same whichever goes into cu_seqlens_q."""
    from mcore_fused.frameworks import forward as model_forward
    from mcore_fused.packing import packed_seq_params

    model, rows = shared(Shape(packed=True)), Rows.of(97, (5, 3), 5)
    with torch.no_grad():
        padded = _jagged(model, rows, pad_to_length_bucket=16)
        monkeypatch.setattr(model_forward, "packed_seq_params", lambda *args: packed_seq_params(*args, "real"))
        real = _jagged(model, rows, pad_to_length_bucket=16)
    assert torch.equal(padded["log_probs"].values(), real["log_probs"].values())


def test_a_layout_that_this_release_cannot_carry_is_refused():
    """P10: a field that would change the result is never left out in silence."""
    from mcore_fused.errors import PackingError, UnsupportedConfigError
    from mcore_fused.packing import PackingLayout, ParallelGroups, layout_of, packed_seq_params, parallel_groups

    names = {field.name for field in dataclasses.fields(type(packed_seq_params(PackingLayout.from_lengths([4]))))}
    contiguous = PackingLayout.from_lengths([4], cp_size=2, cp_layout="contiguous")
    if "cp_partition_mode" in names:
        assert packed_seq_params(contiguous).cp_partition_mode == "contiguous"
    else:
        with pytest.raises(UnsupportedConfigError, match="cp_partition_mode"):
            packed_seq_params(contiguous)
    dynamic = ParallelGroups(local_cp_size=1)
    if "local_cp_size" in names:
        assert packed_seq_params(PackingLayout.from_lengths([4]), dynamic).local_cp_size == 1
        assert parallel_groups(1).local_cp_size == 1  # one rank: the whole data-parallel group
    else:
        with pytest.raises(UnsupportedConfigError, match="local_cp_size"):
            packed_seq_params(PackingLayout.from_lengths([4]), dynamic)
        with pytest.raises(UnsupportedConfigError, match="dynamic context-parallel groups"):
            parallel_groups(1)
    with pytest.raises(PackingError, match="carry no packing layout"):
        layout_of(object())


def test_the_fields_function_names_pack_and_unpack_in_a_cell():
    """L5: packing and unpacking by verl's names share one layout, and refuse the arguments of another batch."""
    from mcore_fused import FusedForwardOutput
    from mcore_fused.errors import PackingError
    from mcore_fused.packing import (
        postprocess_packed_seqs,
        postprocess_packed_seqs_for_dict_output,
        postprocess_thd_engine,
        preprocess_packed_seqs,
        preprocess_thd_engine,
    )

    rows = Rows.of(97, (3, 2), 6)
    packed, params, positions = preprocess_thd_engine(rows.nested, use_fp8_padding=True)
    assert packed.shape == positions.shape == (1, 128)
    assert postprocess_thd_engine(packed, params, rows.nested, 2).values().tolist() == torch.cat(rows.ids).tolist()
    assert postprocess_thd_engine(packed, params, rows.nested, 2, post_process=False) is packed
    rolled, _, _ = preprocess_thd_engine(rows.nested, need_roll=True, roll_fill=-100)
    first, second = (row.tolist() for row in rows.ids)
    assert rolled.tolist() == [[*first[1:], -100, *second[1:], -100]]
    same, _, nothing = preprocess_thd_engine(rows.nested, pre_process=False)
    assert same.is_nested
    assert nothing is None
    for wrong in (
        {"batch_size": 3},
        {"batch_size": 2, "cp_layout": "contiguous"},
        {"batch_size": 2, "local_cp_size": 2},
    ):
        with pytest.raises(PackingError, match="the batch was packed with"):
            postprocess_thd_engine(packed, params, rows.nested, **wrong)

    ids, _, mask, counted = rows.padded(([1, 2, 3], [0, 3]), 4)
    packed, params = preprocess_packed_seqs(ids, mask)
    assert packed.tolist() == [[*first, *second]]
    assert torch.equal(postprocess_packed_seqs(packed, params, mask, 2, 4), ids * mask)
    assert preprocess_packed_seqs(ids, mask, pre_process=False)[0] is ids
    for batch_size, seq_len, some_mask in ((3, 4, mask), (2, 5, mask), (2, 4, mask[:1])):
        with pytest.raises(PackingError, match="the batch was packed with"):
            postprocess_packed_seqs(packed, params, some_mask, batch_size, seq_len)
    values = torch.arange(1.0, 6.0, device=DEVICE)[None]
    packed_mask, _ = preprocess_packed_seqs(counted, mask)
    result = postprocess_packed_seqs_for_dict_output(
        packed_mask, FusedForwardOutput(values, values), params, mask, 2, 4
    )
    assert result["entropy"].tolist() == [[0, 1, 2, 3], [4, 0, 0, 5]]
    assert result["log_probs"].tolist() == [[0, 1, 2, 0], [4, 0, 0, 0]]


def test_fp8_alignment_is_read_from_the_models_own_config():
    """L4: the recipe's block, and a refusal of what has none."""
    from mcore_fused.errors import PackingError, UnsupportedConfigError
    from mcore_fused.frameworks.inputs import read_stage

    model = build(Shape(packed=True))
    config = model.config
    assert read_stage(model).settings.fp8_recipe is None
    config.fp8 = "hybrid"
    for recipe in ("delayed", "blockwise", "mxfp8"):
        config.fp8_recipe = recipe
        assert read_stage(model).settings.fp8_recipe == recipe
    config.fp8_recipe = "custom"
    with pytest.raises(PackingError, match="custom"):
        read_stage(model)
    config.fp8, config.fp4 = None, "e2m1"
    with pytest.raises(UnsupportedConfigError, match="FP4"):
        read_stage(model)
    config.fp4 = None
    config.experimental_attention_variant, config.csa_window_size = "dsv4_hybrid", 24
    assert read_stage(model).settings.min_local_rows == 24
