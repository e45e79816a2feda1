"""MoE routers do not see padding: slots without a token change no loss, no gradient and no statistic of a router."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe import moe_utils
from support.models import Shape, build
from support.models.packed import Rows

from mcore_compat.testing.reference import assert_same_gradients, gradients
from mcore_fused import (
    forward_model_gen,
    forward_no_padding_gen,
    fused_forward_model_gen,
    fused_forward_no_padding_gen,
)
from mcore_fused.frameworks.inputs import read_stage, router_mask
from mcore_fused.packing import PackingLayout, PackingSettings

pytestmark = [
    pytest.mark.needs("factories", "moe", "float64"),
    pytest.mark.since("router_padding_mask"),
]

SHAPE = Shape(packed=True, experts=4)
# Losses of the router that count slots, at weights that show in the gradients.
ROUTER = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"}
ROWS = Rows.of(97, (5, 3))


@pytest.fixture(autouse=True, scope="module")
def _routers_without_transformer_engine():
    """Without Transformer Engine 0.16 asks for a name that it imports from there only (``router_gating_linear``)."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(moe_utils, "te_general_gemm"):
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        yield


def _model():
    model = build(SHAPE, **ROUTER)
    model.train()
    return model


def _jagged(forward, rows, bucket=None, **kwargs):
    model = _model()
    output = forward(model, rows.nested, rows.nested, None, 0.9, True, 0, pad_to_length_bucket=bucket, **kwargs)
    (output["log_probs"].values().sum() + 0.1 * output["entropy"].values().sum()).backward()
    return output["log_probs"].values().detach(), gradients(model)


def _same(actual, expected):
    """To some hundred roundings of float64; without the mask the router's gradient is off by more than a tenth."""
    assert torch.allclose(actual[0], expected[0], atol=1e-10)
    assert_same_gradients(actual[1], expected[1], 1e-9)


@pytest.mark.parametrize("fused", [True, False])
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any),
    bucket=st.sampled_from([2, 8, 16, 24]),
)
def test_packed_padding_changes_nothing(fused, lengths, bucket):
    rows = Rows.of(97, lengths)
    forward = (fused_forward_no_padding_gen if fused else forward_no_padding_gen)()
    _same(_jagged(forward, rows, bucket), _jagged(forward, rows))


@pytest.mark.parametrize("fused", [True, False])
def test_padded_batches_equal_packed_ones(fused, monkeypatch):
    """A padded micro-batch, packed into more slots than it has tokens, as sequence parallelism makes it."""
    expected = _jagged((fused_forward_no_padding_gen if fused else forward_no_padding_gen)(), ROWS)
    monkeypatch.setattr(PackingSettings, "total_multiple", property(lambda _: 16))
    ids, labels, mask, counted = ROWS.padded([torch.arange(5), torch.arange(4, 7)], 7)
    model = _model()
    forward = (fused_forward_model_gen if fused else forward_model_gen)()
    output = forward(model, ids, None, mask, labels, counted, 0.9, None)
    (output["log_probs"].sum() + 0.1 * output["entropy"].sum()).backward()
    _same((output["log_probs"][mask].detach(), gradients(model)), expected)


def test_the_callers_own_mask_is_used():
    """A caller may leave out more than padding: a mask of all slots but the first leaves one for the losses."""
    layout = PackingLayout.from_nested(ROWS.nested, PackingSettings(pad_to_length_bucket=16))
    forward = fused_forward_no_padding_gen()
    own = torch.ones_like(layout.padding_mask)
    own[:, :1] = False
    default, given_mask = _jagged(forward, ROWS, 16), _jagged(forward, ROWS, 16, router_padding_mask=own)
    assert torch.allclose(default[0], given_mask[0], atol=1e-10)
    router = next(name for name in default[1] if name.endswith("router.weight"))
    assert not torch.allclose(default[1][router], given_mask[1][router], rtol=1e-3)


@pytest.mark.parametrize("pre_process", [True, False])
def test_stages_that_do_not_split_the_mask_get_their_slice(pre_process):
    """Under sequence parallelism GPTModel splits the mask on its first stage only; others get their slice."""
    model = _model()
    stage = read_stage(model)
    settings_of_two = PackingSettings(tp_size=2, sequence_parallel=True, pad_to_length_bucket=16)
    layout = PackingLayout.from_nested(ROWS.nested, settings_of_two)
    model.pre_process = pre_process
    for rank in (0, 1):
        groups = type(stage.groups)(tp_size=2, tp_rank=rank)
        mask = router_mask(type(stage)(stage.chain, groups, settings_of_two, has_head=True), layout)["padding_mask"]
        slots = slice(0, 16) if pre_process else slice(8 * rank, 8 * rank + 8)
        assert torch.equal(mask, layout.padding_mask[:, slots])
