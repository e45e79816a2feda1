"""Megatron's own LLaVAModel: its forward knows no fused keyword, rewrites the labels, and returns a tuple.

float64 sums over H = 32 and V = 97 in another order, some hundred unit roundoffs of 1.1e-16 and values below 20: 1e-10.
"""

import pytest
import torch
from support.models import DEVICE, Shape, batch_for, half_chain
from support.models.llava import IMAGE, build_llava, images_for
from support.models.packed import Rows
from support.subjects import patched

from mcore_compat.testing.reference import assert_same_gradients, gradients, log_probs_and_entropy

pytestmark = pytest.mark.needs("call", "patch", "float64", "vlm")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
CLOSE = 1e-10
BF16_CLOSE = 64 * 2**-8  # unfused bf16 logits are rounded once: at most 2^-9 of the largest, which is below 64
LENGTHS = (5, 3, 1, 6)


def _dense_inputs(shape, patches):
    """Two rows, an image inside one and at the start of the other; the mask covers the positions with images."""
    batch, images = batch_for(shape.vocab, 2, 6), images_for(shape, 2, patches)
    ids = batch.ids.clone()
    ids[0, 2] = ids[1, 0] = IMAGE
    positions = 6 + patches**2 - 1
    mask = torch.tril(torch.ones(1, 1, positions, positions, device=DEVICE)).lt(0.5)
    return (images, ids, batch.positions, mask), {
        "labels": batch.labels,
        "loss_mask": torch.ones_like(ids, dtype=torch.float32),
    }


def _stock(model, inputs, keywords, temperature):
    """Log-probs and entropy of LLaVA's stock logits at the labels that LLaVA itself makes."""
    seen = []
    handle = model.language_model.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
    with torch.no_grad():
        model(*inputs, **keywords)
    handle.remove()
    logits = model(*inputs)[0]
    return log_probs_and_entropy(logits.double() / temperature, seen[0]["labels"])


@MODES
@pytest.mark.parametrize("tied", [False, True])
def test_llava_as_it_is_called(subject, mode, tied):
    """P1, P14: images of four positions each, labels as LLaVA lays them; encoder and projector learn as unfused."""
    model = build_llava(Shape(tied=tied), patches=2)
    inputs, keywords = _dense_inputs(Shape(tied=tied), 2)
    expected = _stock(model, inputs, keywords, 0.7)
    (expected[0].sum() + 0.5 * expected[1].sum()).backward()
    stock_gradients = gradients(model)
    before = dict(vars(model)), dict(vars(model.language_model))
    with patched(subject, model, mode):
        output, loss_mask = subject.call(model, *inputs, temperature=0.7, **keywords)
    assert (dict(vars(model)), dict(vars(model.language_model))) == before
    assert loss_mask.shape == output.log_probs.shape == (2, 9)
    for actual, stock in zip((output.log_probs, output.entropy), expected, strict=True):
        assert (actual - stock).abs().max() <= CLOSE
    (output.log_probs.sum() + 0.5 * output.entropy.sum()).backward()
    fused_gradients = gradients(model)
    assert any(name.startswith("vision_model.") for name in fused_gradients)
    assert_same_gradients(fused_gradients, stock_gradients, CLOSE)


@MODES
def test_llava_in_the_training_chain(subject, mode):
    """P13: through the real DDP(Float16Module(LLaVAModel)) outputs are fp32, and encoder and head learn."""
    model = build_llava(Shape(dtype=torch.bfloat16), patches=2)
    inputs, keywords = _dense_inputs(Shape(dtype=torch.bfloat16), 2)
    with torch.no_grad():
        expected = _stock(model, inputs, keywords, 0.7)
    with patched(subject, chain := half_chain(model), mode):
        output, _ = subject.call(chain, *inputs, temperature=0.7, **keywords)
    assert output.log_probs.dtype is output.entropy.dtype is torch.float32
    for actual, stock in zip((output.log_probs, output.entropy), expected, strict=True):
        assert (actual - stock).abs().max() <= BF16_CLOSE
    (output.log_probs.sum() + output.entropy.sum()).backward()
    for part in ("vision_model.", "vision_projection.", "language_model.output_layer."):
        assert any(p.main_grad.any() for name, p in model.named_parameters() if name.startswith(part)), part


def _rows(vocab):
    """Rows of which two have an image, and their labels: nothing predicts an image."""
    rows = Rows.of(vocab, LENGTHS, 3)
    rows.ids[0][2] = rows.ids[3][0] = IMAGE
    ids = rows.nested
    labels = torch.nested.nested_tensor_from_jagged(
        ids.values().masked_fill(ids.values() == IMAGE, -100), ids.offsets()
    )
    return rows, ids, labels


def _calls(mode, padded):
    """The fused and the unfused forward function, called with images."""
    from mcore_fused.frameworks import forward as functions

    rows, ids, labels = _rows(97)
    if padded:
        dense, shifted, mask, counted = rows.padded([list(range(length)) for length in LENGTHS], max(LENGTHS))
        counted &= shifted != IMAGE
        pair = functions.fused_forward_model_gen(mode=mode), functions.forward_model_gen()
        return [lambda *a, f=f: f(a[0], dense, None, mask, shifted, counted, 0.7, {"images": a[1]}) for f in pair]
    pair = functions.fused_forward_no_padding_gen(mode=mode), functions.forward_no_padding_gen()
    return [lambda *a, f=f: f(a[0], ids, labels, {"images": a[1]}, 0.7, True, 0) for f in pair]


def _values(outputs):
    return [outputs[name].values() if outputs[name].is_nested else outputs[name] for name in ("log_probs", "entropy")]


@pytest.mark.needs("factories")
@MODES
@pytest.mark.parametrize("padded", [False, True])
def test_llava_in_the_forward_functions(mode, padded):
    """P1, P10: packed ids, an image's embedding in place of its mark; fused equals unfused, outputs and gradients."""
    shape = Shape(packed=True)
    model, images, calls = build_llava(shape), images_for(shape, 2), _calls(mode, padded)
    results, learned = [], []
    for call in calls:
        results.append(_values(call(model, images)))
        sum(weight * value.sum() for weight, value in zip((1.0, 0.5), results[-1], strict=True)).backward()
        learned.append(gradients(model))
    for fused, unfused in zip(*results, strict=True):
        assert (fused - unfused).abs().max() <= CLOSE
    assert any(name.startswith("vision_model.") for name in learned[0])
    assert_same_gradients(*learned, CLOSE)
    with torch.no_grad():
        assert not torch.allclose(_values(calls[0](model, images.flip(0)))[0], results[0][0], atol=1e-3)


@pytest.mark.needs("factories", "refusal")
@pytest.mark.parametrize("fused", [True, False])
def test_llava_packs_nothing_by_itself(fused):
    """P10: padded ids would be taken for packed ones."""
    from mcore_fused.errors import UnsupportedModelError
    from mcore_fused.frameworks import forward as functions

    shape, (_, ids, labels) = Shape(packed=True), _rows(97)
    make = functions.fused_forward_no_padding_gen if fused else functions.forward_no_padding_gen
    with pytest.raises(UnsupportedModelError, match=r"LLaVAModel does not pack.*Next step: use vision_model=False"):
        make(vision_model=True)(build_llava(shape), ids, labels, {"images": images_for(shape, 2)}, 1.0, True, 0)
