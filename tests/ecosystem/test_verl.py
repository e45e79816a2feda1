"""The adapter of verl (``support/subjects/verl.py``) and its real package on the real GPTModel, on a CPU.

verl's kernel needs a GPU, so torch stands in its place here: what is tested is that verl's patch applies, that its
forward is reached, and that both mean what the adapter says. What verl's own kernel gives is judged by
``ci/gpu --subject verl``.
"""

import sys

import pytest
import torch
from support.models import Shape, batch_for, build, half_chain, unwrapped
from support.models.packed import Rows, rows_alone
from support.models.release import features
from support.subjects import patched
from support.subjects.verl import Verl, load
from verl_torch import verl_on_torch

import mcore_fused
from mcore_compat.testing.reference import stock_forward

# float64 models; the outputs are fp32 with values up to some tens.
CLOSE = 1e-5


@pytest.fixture
def verl(monkeypatch):
    return verl_on_torch(monkeypatch)


def _case(rows=1, **shape):
    return build(Shape(**shape)), batch_for(97, rows, 7)


def test_loading_it_leaves_no_stand_in_behind():
    load()
    stand_ins = [name for name, module in sys.modules.items() if type(module).__name__ == "_Names"]
    assert not stand_ins
    assert "ray" not in sys.modules


def test_its_mode_is_the_release_s(verl):
    expected = "hook" if "hook" in features() else "legacy"
    model = build(Shape(dtype=torch.bfloat16))
    assert verl.mode(model) == verl.mode(half_chain(model)) == expected
    with pytest.raises(LookupError, match="cannot be forced"):
        verl.patch(model, "legacy")


@pytest.mark.parametrize("tied", [False, True])
def test_its_patch_is_applied_and_its_forward_is_reached(verl, tied):
    model, batch = _case(tied=tied)
    stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    before = verl.evidence()
    with patched(verl, model):
        replaced = "forward" in vars(unwrapped(model))
        output = verl.call(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    assert replaced == ("hook" not in features())
    assert output.log_probs.shape == batch.labels.shape
    assert (output.log_probs - stock.log_probs).abs().max() <= CLOSE
    assert (output.entropy - stock.entropy).abs().max() <= CLOSE
    counter = "hook_calls" if "hook" in features() else "deferred_head_calls"
    counted = {name: count - before[name] for name, count in verl.evidence().items()}
    assert counted == dict.fromkeys(before, 0) | {counter: 1}, "torch stood in the kernel's place: no launch is counted"
    # The same call by this project's own library, on a model of its own: verl's unpatch leaves a `forward` behind.
    model, _ = _case(tied=tied)
    with mcore_fused.fused_forward(model):
        ours = mcore_fused.call_fused_forward(model, *batch.inputs, labels=batch.labels, temperature=0.7)
    assert (ours.log_probs - output.log_probs).abs().max() <= CLOSE


def test_several_rows_are_paired_wrongly(verl):
    """The finding of ``test_lane_numbers.py``, without a GPU: hidden states lie [s, b], labels [b, s]."""
    model, batch = _case(rows=3)
    stock = stock_forward(model, *batch.inputs, labels=batch.labels)
    with patched(verl, model):
        output = verl.call(model, *batch.inputs, labels=batch.labels)
    assert (output.log_probs - stock.log_probs).abs().max() > 0.1


def test_its_engine_forward_agrees_with_ours_on_a_packed_batch(verl):
    shape, rows = Shape(packed=True), Rows.of(97, (5, 1, 9, 3))
    model = build(shape)
    with torch.no_grad(), patched(verl, model):
        output = verl.jagged_forward()(model, rows.nested, rows.nested, {}, 0.7, True, 0)
    with torch.no_grad():
        ours = mcore_fused.fused_forward_no_padding_gen()(build(shape), rows.nested, rows.nested, {}, 0.7, True, 0)
    labelled = torch.cat([torch.arange(len(ids)) < len(ids) - 1 for ids in rows.ids])
    alone = torch.cat([pair[0] for pair in rows_alone(build(shape), rows, [0.7] * 4)])
    for found in (output, ours):
        assert (found["log_probs"].values() - alone)[labelled].abs().max() <= CLOSE


def test_a_model_that_verl_patched_is_no_model_of_ours(verl):
    """P4: two features patch the same forward. Where verl replaces it, this project's patch refuses and says why.

    So it does after verl's unpatch, which leaves the bound method in ``vars(model)``.
    """
    model, batch = _case()
    with patched(verl, model):
        if "hook" in features():
            with mcore_fused.fused_forward(model):
                ours = mcore_fused.call_fused_forward(model, *batch.inputs, labels=batch.labels)
            assert ours.log_probs.shape == batch.labels.shape
        else:
            with pytest.raises(mcore_fused.MCoreFusedError, match="already replaced"):
                mcore_fused.patch_fused_forward(model)
    if "hook" not in features():
        with pytest.raises(mcore_fused.MCoreFusedError, match="already replaced"):
            mcore_fused.patch_fused_forward(model)


def test_without_a_gpu_its_kernel_refuses():
    """Nothing of verl is green on a CPU: its own kernel does not run there."""
    model, batch = _case(dtype=torch.bfloat16, hidden=128)
    subject = Verl()
    with torch.no_grad(), patched(subject, model), pytest.raises((AssertionError, RuntimeError)):
        subject.call(model, *batch.inputs, labels=batch.labels)
    assert subject.evidence()["kernel_launches"] == 0
