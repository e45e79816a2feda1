"""What frameworks really hold: DDP, Float16Module, VLMs, compiled models, and chains of them."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from support.models import Shape, batch_for, build, half_chain
from support.subjects import patched
from test_patch_machine import VisionLanguageModel

from mcore_compat.testing.reference import gradients, stock_forward

pytestmark = pytest.mark.needs("call")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
BF16 = Shape(dtype=torch.bfloat16)
# One rounding of a logit to bf16 is 2^-9 of its size; the suite's logits stay below 16.
BF16_LOGIT_ERROR = 16 * 2.0**-8


@MODES
@pytest.mark.parametrize("tied", [False, True])
def test_ddp_float16_module(subject, mode, tied):
    """The real training chain: outputs are fp32, gradients land in DDP's buffers."""
    model, batch = build(Shape(dtype=torch.bfloat16, tied=tied)), batch_for(97, 2, 6)
    stock = stock_forward(model, *batch.inputs, labels=batch.labels)
    chain = half_chain(model)
    with patched(subject, chain, mode):
        output = subject.call(chain, *batch.inputs, labels=batch.labels)
    assert output.log_probs.dtype is output.entropy.dtype is torch.float32
    assert torch.allclose(output.log_probs.double(), stock.log_probs, atol=BF16_LOGIT_ERROR)
    output.log_probs.sum().backward()
    weight = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    assert weight.main_grad.any()
    assert all(torch.isfinite(parameter.main_grad).all() for parameter in model.parameters())


@MODES
def test_ddp_gradients_equal_the_unfused_chain(subject, mode):
    """fp32 model under DDP: what lands in ``main_grad`` is what stock puts there, to some hundred fp32 roundings."""
    found = []
    for fused in (False, True):
        model, batch = build(Shape(dtype=torch.float32)), batch_for(97, 2, 6)
        chain = DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=False), model)
        if fused:
            with patched(subject, chain, mode):
                log_probs = subject.call(chain, *batch.inputs, labels=batch.labels).log_probs
        else:
            log_probs = stock_forward(model, *batch.inputs, labels=batch.labels).log_probs
        log_probs.sum().backward()
        found.append({name: parameter.main_grad.clone() for name, parameter in model.named_parameters()})
    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.needs("vlm")
@MODES
@pytest.mark.parametrize("wrap", [lambda outer, _: outer, lambda outer, config: Float16Module(config, outer)])
def test_vision_language_model(subject, mode, wrap):
    """P1, P14, NeMo-RL#3951: the outer forward rejects unknown keywords; all facts come from the inner model."""
    inner, batch = build(BF16), batch_for(97, 2, 6)
    chain = wrap(VisionLanguageModel(inner), inner.config)
    with patched(subject, inner, mode):
        expected = subject.call(inner, *batch.inputs, labels=batch.labels, temperature=0.8)
    before = dict(vars(inner))
    with patched(subject, chain, mode):
        during = dict(vars(inner))
        output = subject.call(chain, *batch.inputs, labels=batch.labels, temperature=0.8)
        assert vars(inner) == during
    assert vars(inner) == before
    assert torch.equal(output.log_probs, expected.log_probs)


class _HandsAttributesOn(torch.nn.Module):
    """Stands for PEFT's wrappers: asked for anything that it lacks, it answers for the model inside."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


@pytest.mark.needs("refusal")
@MODES
def test_a_wrapper_that_hands_its_attributes_on(subject, mode):
    """It has all that makes a language model, and is none: unknown it is refused by name, as PEFT's it is seen through.

    The real package is in tests/ecosystem.
    """
    inner, batch = build(Shape()), batch_for(97, 2, 6)
    with pytest.raises(Exception, match=r"_HandsAttributesOn.*Next step:"):
        subject.patch(_HandsAttributesOn(inner), mode)
    as_peft = type("PeftModel", (_HandsAttributesOn,), {"__module__": "peft.peft_model", "__qualname__": "PeftModel"})
    chain = as_peft(inner)
    stock = stock_forward(inner, *batch.inputs, labels=batch.labels)
    with patched(subject, chain, mode):
        output = subject.call(chain, *batch.inputs, labels=batch.labels)
    assert torch.allclose(output.log_probs, stock.log_probs, atol=1e-10)


def _compiled_in_place(model):
    model.decoder.compile(backend="aot_eager")


def _compiled_around(model):
    model.decoder = torch.compile(model.decoder, backend="eager")


@pytest.mark.needs("patch", "legacy")
@pytest.mark.parametrize("compiled", [_compiled_in_place, _compiled_around])
def test_compiled_decoder(subject, compiled):
    """P12: the whole decoder compiled: both modes and the unpatched model compute what the uncompiled one does.

    And patching, its dry run included, makes torch compile nothing anew.
    """
    torch._dynamo.reset()  # what other checks have compiled counts towards a limit
    model, batch = build(Shape(layers=1)), batch_for(97, 2, 6)

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def stock():
        output = stock_forward(model, *batch.inputs, labels=batch.labels)
        (output.log_probs.sum() + output.entropy.sum()).backward()
        return output.log_probs.detach(), list(gradients(model).values())

    def fused(mode):
        with patched(subject, model, mode):
            output = subject.call(model, *batch.inputs, labels=batch.labels)
        (output.log_probs.sum() + output.entropy.sum()).backward()
        return output.log_probs.detach(), list(gradients(model).values())

    (expected, expected_gradients), before = stock(), graphs()
    compiled(model)
    stock(), stock()  # the second call may be compiled once more, with strides of its gradients known
    warm = graphs()
    assert warm > before
    for log_probs, learned in (fused("auto"), fused("legacy"), stock()):
        assert torch.allclose(log_probs, expected, atol=1e-10)
        for gradient, other in zip(learned, expected_gradients, strict=True):
            assert torch.allclose(gradient, other, atol=1e-10)
    assert graphs() == warm


@MODES
def test_activation_recompute(subject, mode):
    """Full recompute of the layers changes no output and no gradient."""
    results = []
    for recompute in (False, True):
        model, batch = build(Shape(recompute=recompute)), batch_for(97, 2, 6)
        model.train()
        with patched(subject, model, mode):
            output = subject.call(model, *batch.inputs, labels=batch.labels)
        (output.log_probs.sum() + output.entropy.sum()).backward()
        results.append((output.log_probs.detach(), gradients(model)))
    (plain, plain_gradients), (again, again_gradients) = results
    assert torch.equal(plain, again)
    for name, gradient in plain_gradients.items():
        assert torch.allclose(gradient, again_gradients[name], atol=1e-12), name


@MODES
def test_head_pre_hooks_run(subject, mode):
    """DDP's overlapped parameter gather waits in a forward-pre-hook of the head; bypassing it reads stale weights."""
    model, batch, calls = build(Shape()), batch_for(97, 2, 6), []
    handle = model.output_layer.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad(), patched(subject, model, mode):
        subject.call(model, *batch.inputs, labels=batch.labels)
    handle.remove()
    assert calls == [1]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@MODES
def test_without_gradients(subject, mode, context):
    model, batch = build(Shape()), batch_for(97, 2, 6)
    with patched(subject, model, mode):
        with context():
            quiet = subject.call(model, *batch.inputs, labels=batch.labels)
        loud = subject.call(model, *batch.inputs, labels=batch.labels)
    assert not quiet.log_probs.requires_grad
    assert loud.log_probs.requires_grad
    assert torch.equal(quiet.log_probs, loud.log_probs.detach())
