"""The 1F1B schedule plan's post-process node gives fused outputs as one tensor, in both modes.

The node is the real one; it is run by itself on given hidden states, as the schedule would run it last.
"""

import pytest
import torch
from support.models import Shape, batch_for, build
from support.subjects import patched

from mcore_compat.testing.reference import log_probs_and_entropy

pytestmark = [pytest.mark.needs("patch", "float64", "schedule_plan")]

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


def _node(model, batch, labels, **kwargs):
    from mcore_fused import build_fused_schedule_plan

    plan = build_fused_schedule_plan(model, *batch.inputs, labels=labels, **kwargs)
    plan.pre_process.forward()
    return plan.post_process


def _stock_node(model, batch):
    """The same node without labels: it returns stock logits ``[batch, seq, vocab]``."""
    plan = model.build_schedule_plan(*batch.inputs)
    plan.pre_process.forward()
    return plan.post_process


def _hidden(device):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 2, 32, dtype=torch.float64, generator=generator).to(device).requires_grad_()


@pytest.mark.since("schedule_plan")
@MODES
@pytest.mark.parametrize("tied", [False, True])
def test_schedule_plan_outputs(subject, mode, tied):
    """A7: a dataclass fails in make_viewless; one tensor passes, with its gradient."""
    model, batch = build(Shape(tied=tied)), batch_for(97, 2, 6)
    hidden = _hidden(batch.labels.device)
    stock_node = _stock_node(model, batch)
    logits = stock_node.forward(hidden).detach().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, batch.labels, 0.7)
    (log_probs.sum() - entropy.sum()).backward()
    expected_gradient = stock_node.backward(logits.grad)
    before = dict(vars(model))
    with patched(subject, model, mode):
        node = _node(model, batch, batch.labels, temperature=0.7)
        result = node.forward(hidden)
    assert vars(model) == before
    assert result.shape == (2, 2, 6)
    assert torch.allclose(result[0], log_probs, atol=1e-9)
    assert torch.allclose(result[1], entropy, atol=1e-9)
    gradient = node.backward(torch.stack((torch.ones_like(result[0]), -torch.ones_like(result[1]))))
    assert torch.allclose(gradient, expected_gradient, atol=1e-9)


@pytest.mark.since("schedule_plan")
@MODES
def test_schedule_plans_of_two_micro_batches(subject, mode):
    """The nodes run later than the plans are built: each micro-batch keeps its own temperature and labels."""
    model, first, second = build(Shape()), batch_for(97, 2, 6, 1), batch_for(97, 2, 6, 2)
    hidden = _hidden(first.labels.device)
    with patched(subject, model, mode):
        nodes = [_node(model, first, first.labels, temperature=0.5), _node(model, second, second.labels)]
        results = [node.forward(hidden) for node in reversed(nodes)]
        alone = _node(model, first, first.labels, temperature=0.5).forward(hidden)
    assert torch.equal(results[1], alone)
    assert not torch.equal(results[0], alone)


@MODES
def test_schedule_plan_is_refused_where_there_is_none(subject, mode):
    from mcore_fused import build_fused_schedule_plan

    model, batch = build(Shape()), batch_for(97, 2, 6)
    if hasattr(model, "build_schedule_plan"):
        type_without = type("Without", (type(model),), {"build_schedule_plan": None})
        model.__class__ = type_without
    with patched(subject, model, mode), pytest.raises(Exception, match="build_schedule_plan"):
        build_fused_schedule_plan(model, *batch.inputs, labels=batch.labels)
