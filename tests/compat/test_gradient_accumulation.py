"""``gradient_accumulation_fusion=True``: every weight's ``main_grad`` is what stock Megatron makes of it.

With it the stock head adds its weight gradient to ``main_grad``, marks the weight, and DDP drops the weight's autograd
gradient from then on (or adds it, for a weight that the embedding shares). A fused head that returns its gradient
through autograd loses it as soon as the stock head has run in the same step: for another micro-batch, or for MTP.
"""

import pytest
import torch
from support.models import Shape, build
from support.ranks.gradient_accumulation import Wrapping, accumulated, pipeline_accumulated
from support.subjects import patched

from mcore_compat.testing.ranks import run_ranks

pytestmark = pytest.mark.needs("call", "patch", "main_grad")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TIED = pytest.mark.parametrize("tied", [False, True])
# fp32 gradients of two layers and a head, summed in another order: some dozens of roundings of 6e-8 each, relative to
# the whole gradient. What is lost or counted twice is a part of it of 0.05 and more.
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _fresh_loss_tracker():
    """Upstream logs MTP losses into a class-wide tensor that the first model sizes."""
    try:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    except ImportError:
        return
    MTPLossLoggingHelper.tracker.clear()


def assert_same_main_grads(actual, expected, tolerance=CLOSE):
    assert actual.keys() == expected.keys()
    for name, (gradient, added) in expected.items():
        found, found_added = actual[name]
        difference = (found.double() - gradient.double()).norm()
        scale = max(gradient.double().norm().item(), 1e-12)
        assert difference <= tolerance * scale, f"{name}: relative difference {difference / scale:.3g}"
        assert found_added == added, f"{name}: grad_added_to_main_grad is {found_added}, with stock {added}"


@MODES
@TIED
def test_one_micro_batch(mode, tied):
    shape = Shape(tied=tied, dtype=torch.float32)
    assert_same_main_grads(accumulated(shape, ["policy"], mode), accumulated(shape, ["policy"], "stock"))


@pytest.mark.needs("mtp")
@pytest.mark.since("mtp")
@MODES
@TIED
def test_with_mtp(mode, tied):
    """In hook mode MTP's loss goes through the stock head, in legacy mode through the fused one."""
    shape = Shape(tied=tied, mtp=1, dtype=torch.float32)
    assert_same_main_grads(accumulated(shape, ["policy"], mode), accumulated(shape, ["policy"], "stock"))


@MODES
@TIED
@pytest.mark.parametrize(
    "kinds", [("loss", "policy"), ("policy", "loss"), ("logits", "policy", "policy", "loss")], ids="-".join
)
def test_stock_and_fused_micro_batches_in_any_order(mode, tied, kinds):
    shape = Shape(tied=tied, dtype=torch.float32)
    assert_same_main_grads(accumulated(shape, kinds, mode), accumulated(shape, kinds, "stock"))


@MODES
@TIED
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_overlapped_reduction(mode, tied, distributed_optimizer):
    """With ``overlap_grad_reduce`` DDP's hook insists on a gradient, and a bucket leaves as soon as all have come."""
    shape = Shape(tied=tied, dtype=torch.float32)
    wrapping = Wrapping(overlap=True, distributed_optimizer=distributed_optimizer)
    kinds = ("loss", "policy")
    assert_same_main_grads(accumulated(shape, kinds, mode, wrapping), accumulated(shape, kinds, "stock", wrapping))


@MODES
@pytest.mark.parametrize("reduce_in_fp32", [False, True])
def test_half_precision_buffers(mode, reduce_in_fp32):
    """bf16 weights as trained, into fp32 or bf16 buffers.

    Stock rounds each logit (up to 2^5 here) to bf16: an error of 2^-4 moves a probability by up to 6 %, in random
    directions. A lost or doubled micro-batch is more than a third of the gradient.
    """
    shape = Shape(dtype=torch.bfloat16)
    wrapping, kinds = Wrapping(reduce_in_fp32=reduce_in_fp32), ("loss", "policy")
    expected = accumulated(shape, kinds, "stock", wrapping)
    assert_same_main_grads(accumulated(shape, kinds, mode, wrapping), expected, 0.15)
    assert expected["output_layer.weight"][0].dtype == (torch.float32 if reduce_in_fp32 else torch.bfloat16)


@MODES
def test_with_full_recompute(mode):
    shape, kinds = Shape(dtype=torch.float32, recompute=True), ("policy", "loss")
    assert_same_main_grads(accumulated(shape, kinds, mode), accumulated(shape, kinds, "stock"))


@pytest.mark.needs("tensor_parallel")
@MODES
@TIED
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(mode, tied, sequence_parallel):
    """Each rank's shard of the head."""
    shape = Shape(tied=tied, vocab=96, tp=2, sequence_parallel=sequence_parallel, dtype=torch.float32)
    for actual, expected in zip(
        run_ranks(accumulated, shape, ("loss", "policy"), mode, world=2, tp=2),
        run_ranks(accumulated, shape, ("loss", "policy"), "stock", world=2, tp=2),
        strict=True,
    ):
        assert_same_main_grads(actual, expected)


@pytest.mark.needs("pipeline")
@MODES
@TIED
def test_pipeline_stages(mode, tied):
    """The last stage's own copy of a tied embedding keeps its own books: it is not zeroed, and reduced afterwards."""
    shape = Shape(tied=tied, vocab=96, pp=2, dtype=torch.float32)
    for actual, expected in zip(
        run_ranks(pipeline_accumulated, shape, mode, world=2, pp=2),
        run_ranks(pipeline_accumulated, shape, "stock", world=2, pp=2),
        strict=True,
    ):
        assert_same_main_grads(actual, expected)


@pytest.mark.needs("refusal")
@MODES
def test_deferred_weight_gradients_are_refused(subject, mode):
    """Pipelines may collect what the head's weight gradient is made of and multiply it in the cool-down phase.

    The fused head leaves nothing there, and the drain of an empty collection is a bare IndexError at the end of a step.
    """
    model = build(Shape(dtype=torch.float32))
    model.config.defer_embedding_wgrad_compute = True
    with pytest.raises(Exception, match=r"defer_embedding_wgrad_compute.*Next step:"), patched(subject, model, mode):
        pass
