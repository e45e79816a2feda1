"""What the fused head is given stays as it is: upstream gradients, and temperatures in their own precision."""

import pytest
import torch
from support.models import DEVICE, Shape, batch_for, build, half_chain
from support.subjects import patched

from mcore_compat.testing.reference import assert_same_gradients, gradients, stock_forward

pytestmark = pytest.mark.needs("call", "patch")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


@pytest.mark.needs("float64")
@MODES
def test_one_gradient_tensor_for_both_outputs(subject, mode):
    """A caller may hand the same tensor to both outputs, and use it afterwards: no backward may write into it.

    One that scales it in place (by 1 / temperature, or by the entropy's weight) returns wrong gradients of the other
    output, and spoils the caller's tensor. One row, so that no copy is made on the way to the kernel.
    """
    model, batch = build(Shape()), batch_for(97, 1, 7)
    upstream = torch.randn(1, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(DEVICE)
    before = upstream.clone()
    stock = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=0.5)
    torch.autograd.backward([stock.log_probs, stock.entropy], [upstream.clone(), upstream.clone()])
    expected = gradients(model)
    with patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels, temperature=0.5)
        torch.autograd.backward([output.log_probs, output.entropy], [upstream, upstream])
    assert torch.equal(upstream, before)
    assert_same_gradients(gradients(model), expected, 1e-10)


@pytest.mark.needs("temperature_per_token")
@MODES
def test_a_temperature_per_token_keeps_its_precision(subject, mode):
    """A bf16 model behind its real wrappers, which cast floating inputs: 0.7 for every token is the number 0.7.

    In fp32 the two differ by one rounding of 6e-8, on logits of up to 2^5 / 0.7 by 3e-6 each. bf16 makes 0.69921875 of
    it, which moves log-probs by 1e-3 of their distance from the mean logit.
    """
    chain, batch = half_chain(build(Shape(dtype=torch.bfloat16))), batch_for(97, 2, 7)
    each = torch.full_like(batch.labels, 0.7, dtype=torch.float32)
    with torch.no_grad(), patched(subject, chain, mode):
        expected = subject.call(chain, *batch.inputs, labels=batch.labels, temperature=0.7)
        actual = subject.call(chain, *batch.inputs, labels=batch.labels, temperature=each)
    assert (actual.log_probs - expected.log_probs).abs().max() <= 2e-5
    assert (actual.entropy - expected.entropy).abs().max() <= 1e-4
