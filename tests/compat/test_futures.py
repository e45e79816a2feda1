"""What the library does when it meets the Megatrons of next year (see support/models/futures.py).

Each future ends in one of three ways: a typed error that names what changed and the next step, tolerated and
recorded, or legacy mode with the right numbers. Never in a plausible wrong number.
"""

import pytest
import torch
from support.models import Shape, batch_for, build, futures
from support.subjects import patched

import mcore_fused
from mcore_compat.testing.reference import assert_same_gradients, gradients, stock_forward
from mcore_fused import MCoreFusedError

pytestmark = [pytest.mark.needs("patch", "legacy", "library"), pytest.mark.since("upstream_hook")]

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
BATCH = batch_for(97, 2, 5)


def _right(subject, model, mode, batch=BATCH, **kwargs):
    """The fused call equals the reference of the release that nobody has changed."""
    with torch.no_grad():
        stock = stock_forward(build(Shape()), *batch.inputs, labels=batch.labels, temperature=0.7)
        with patched(subject, model, mode):
            output = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.7, **kwargs)
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)
    assert torch.allclose(output.entropy, stock.entropy, atol=1e-10)


def _refused(subject, model, mode, words, batch=BATCH, **kwargs):
    """Patching or calling ends in this library's own error, with these words and a next step."""
    before = dict(vars(model))
    with torch.no_grad(), pytest.raises(MCoreFusedError, match=words) as caught, patched(subject, model, mode):
        subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.7, **kwargs)
    assert caught.value.next_step
    assert "megatron-core" in str(caught.value) or caught.value.version is None
    assert dict(vars(model)) == before


def test_a_seventeenth_keyword_is_tolerated_and_recorded(subject):
    """U1, verl#6596: a closed signature fails at upstream's next keyword; a swallowed one may mean something."""
    model = build(Shape(), cls=futures.SeventeenthKeyword)
    assert subject.mode(model) == "hook"
    _right(subject, model, "auto")
    # A release may hand over more by itself; what is new here must be among what was recorded.
    assert "logit_dtype" in mcore_fused.fused_forward_evidence(model).unknown_keywords


@pytest.mark.parametrize(
    ("future", "missing"), [(futures.RenamedKeyword, "scale_logits"), (futures.KeywordGone, "output_weight")]
)
def test_a_keyword_that_is_gone_is_named_and_legacy_still_works(subject, future, missing):
    """An unusable hook means legacy mode and one warning; whoever forces the hook is refused."""
    _refused(subject, build(Shape(), cls=future), "hook", rf"no longer hands over {missing}.*legacy")
    model = build(Shape(), cls=future)
    with pytest.warns(UserWarning, match=rf"no longer hands over {missing}") as warned:
        assert subject.mode(model) == subject.mode(model) == "legacy"
    assert len(warned) == 1
    _right(subject, model, "auto")
    _right(subject, build(Shape(), cls=future), "legacy")


@pytest.mark.since("mtp")
def test_a_hook_before_mtp_is_not_used(subject):
    """U5, verl#5587: MTP's helpers move; right log-probs and a silent loss of MTP's training must not come of it."""
    shape, batch = Shape(mtp=1), batch_for(97, 2, 7)
    extra = {"labels": batch.labels, "loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)}
    stock = build(shape)
    stock.train()
    stock_forward(stock, *batch.inputs, **extra).log_probs.sum().backward()
    model = build(shape, cls=futures.HookBeforeMtp)
    model.train()
    assert subject.mode(model) == "legacy"
    with patched(subject, model):
        subject.call(model, *batch.inputs, **extra).log_probs.sum().backward()
    # Stock computes MTP's loss in fp32 (unit roundoff 6e-8), so its gradients agree to some 1e-6 of their size.
    assert_same_gradients(gradients(model), gradients(stock), 2e-6)


def test_a_hook_that_is_called_twice_is_an_error(subject):
    _refused(subject, build(Shape(), cls=futures.HookCalledTwice), "auto", r"2 times.*legacy")
    _right(subject, build(Shape(), cls=futures.HookCalledTwice), "legacy")


@pytest.mark.parametrize("seq", [5, 2])
def test_transposed_labels_are_noticed(subject, seq):
    """With as many rows as tokens the shapes say nothing, and every pairing but the diagonal would be wrong."""
    batch = batch_for(97, 2, seq)
    _refused(subject, build(Shape(), cls=futures.TransposedLabels), "auto", "labels", batch)
    _right(subject, build(Shape(), cls=futures.TransposedLabels), "legacy", batch)


@MODES
def test_a_renamed_output_layer_is_named(subject, mode):
    _refused(subject, build(Shape(), cls=futures.OutputLayerRenamed), mode, "output_layer")


@MODES
def test_upstreams_head_that_can_compute_the_loss(subject, mode):
    """Upstream's dev branch: every GPTModel has it. Its product is fused; a configuration in which it is asked for the
    loss is refused, since what the head then returns are no logits."""
    _right(subject, build(Shape(), cls=futures.HeadThatCanComputeTheLoss), mode)
    model = build(Shape(), cls=futures.HeadThatCanComputeTheLoss)
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "linear"
    _refused(subject, model, mode, "cross_entropy_fusion_impl")


@MODES
@pytest.mark.parametrize(
    ("operation", "named"),
    [
        (lambda logits: 30 * torch.tanh(logits / 30), "__truediv__"),
        (lambda logits: logits + 1, "__add__"),
        (lambda logits: logits.float(), "float"),
        (lambda logits: torch.clamp(logits, max=5), "clamp"),
        (lambda logits: logits[..., :96], "__getitem__"),
        (lambda logits: logits * torch.ones(97, dtype=torch.float64), "multiplication|mul"),
        (lambda logits: torch.ones(97, dtype=torch.float64) * logits, "multiplication|mul"),
        (lambda logits: -logits, "__neg__"),
    ],
)
def test_logits_touched_by_a_new_operation(subject, mode, operation, named):
    _refused(subject, build(Shape(), cls=futures.touched_by(operation)), mode, named)


@MODES
def test_logits_multiplied_by_a_number_are_followed(subject, mode):
    """The one operation that the head knows; stock of the same future is the reference."""
    model = build(Shape(), cls=futures.touched_by(lambda logits: 0.5 * logits * 3))
    with torch.no_grad():
        stock = stock_forward(model, *BATCH.inputs, labels=BATCH.labels)
        with patched(subject, model, mode):
            output = subject.call(model, *BATCH.inputs, labels=BATCH.labels)
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)


@MODES
def test_logits_transformed_inside_the_loss_are_refused(subject, mode):
    """The fused head stands in for the loss method too; one that does more than the loss would lose its part."""
    _refused(subject, build(Shape(), cls=futures.LossTransformsLogits), mode, "compute_language_model_loss")


def test_a_new_required_parameter_is_named_and_passed_on(subject):
    """The dry run cannot know it; a forced mode works, because all keywords reach the model's own forward."""
    _refused(subject, build(Shape(), cls=futures.RequiredParameter), "auto", "routing_plan", routing_plan="plan")
    for mode in ("hook", "legacy"):
        _right(subject, build(Shape(), cls=futures.RequiredParameter), mode, routing_plan="plan")


def test_a_removed_hook_means_legacy(subject):
    model = build(Shape(), cls=futures.HookRemoved)
    assert subject.mode(model) == "legacy"
    _right(subject, model, "auto")
