"""Options of the kernel on the GPU: ``main_grad`` and counted rows, on the Gluon and the plain Triton path."""

import pytest
import torch

from mcore_fused.kernel import PolicyLoss, fused_linear_policy_loss, launchers, linear_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKENS, WIDTH, ROWS = 1024, 512, 8192


@pytest.fixture(params=[False, True], ids=["best", "plain Triton"], autouse=True)
def path(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(launchers, "gluon_enabled", lambda *_: False)


def tensors(share=1.0):
    rng = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", generator=rng).bfloat16()
    weight = (torch.randn(ROWS, WIDTH, device="cuda", generator=rng) / 16).bfloat16()
    labels = torch.randint(0, ROWS, (TOKENS,), device="cuda", generator=rng)
    labels[torch.arange(TOKENS, device="cuda") % 128 >= int(128 * share)] = -100
    return hidden, weight, labels, torch.randn(2, TOKENS, device="cuda", generator=rng)


def head(hidden, weight, labels, upstream, **options):
    outputs = linear_cross_entropy(hidden, weight, labels, 0.8, backend="triton", **options)
    torch.autograd.backward(outputs, list(upstream))
    return [o.detach() for o in outputs]


def folded(hidden, weight, labels, upstream, **options):
    policy = PolicyLoss("policy_gradient", entropy_coefficient=0.1)
    output = fused_linear_policy_loss(
        hidden, weight, labels, upstream[0].clone(), policy, temperature=0.8, backend="triton", **options
    )
    (output.loss * 100).backward()
    return [output.log_probs, output.entropy]


@pytest.mark.parametrize("call", [head, folded])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace", [{}, {"several chunks": True}], ids=["one chunk", "several chunks"])
def test_main_grad(call, main_dtype, workspace) -> None:
    """Twice into a buffer that holds something: as often as autograd's gradient, within the buffer's rounding."""
    options = {}
    if workspace:
        options = {"workspace_bytes": 1 << 20} if call is head else {"logits_bytes": 1 << 22}
    hidden, weight, labels, upstream = tensors()
    w = weight.float().bfloat16().requires_grad_()
    call(hidden.clone().requires_grad_(), w, labels, upstream, **options)
    expected = w.grad.float()
    w = torch.nn.Parameter(weight.clone())
    start = expected.abs().mean().to(main_dtype)
    w.main_grad = start.expand(weight.shape).clone()
    w.grad_added_to_main_grad, w.zero_out_wgrad = False, True
    for _ in range(2):
        call(hidden.clone().requires_grad_(), w, labels, upstream, gradient_accumulation_fusion=True, **options)
    got = w.main_grad.float() - start.float()
    # bf16: autograd's gradient is rounded once (2^-9 of its norm at most), a bf16 buffer after every addition
    bound = 2.0**-8 if main_dtype is torch.float32 else 2.0**-6
    assert float((got - 2 * expected).norm() / (2 * expected).norm()) <= bound
    assert w.grad_added_to_main_grad
    assert not bool(w.grad.any())


def test_main_grad_needs_no_second_weight_gradient() -> None:
    """The peak beyond the buffer is the workspace, and the dummy that nothing is written to."""
    hidden, weight, labels, upstream = tensors()
    w = torch.nn.Parameter(weight.repeat(8, 1))
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(w.shape, device="cuda"), False
    head(hidden, w, labels, upstream, gradient_accumulation_fusion=True, workspace_bytes=1 << 22)
    w.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head(hidden, w, labels, upstream, gradient_accumulation_fusion=True, workspace_bytes=1 << 22)
    assert torch.cuda.max_memory_allocated() - before <= w.numel() * 2 + (16 << 20)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_counted_rows_equal_a_call_on_them_alone_bit_for_bit(share) -> None:
    hidden, weight, labels, upstream = tensors(share)
    rows = (labels != -100).nonzero()[:, 0]
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = head(h, w, labels, upstream, counted_rows=len(rows))
    h1, w1 = hidden[rows].clone().requires_grad_(), weight.clone().requires_grad_()
    alone = head(h1, w1, labels[rows], upstream[:, rows])
    for output, value in zip(outputs, alone, strict=True):
        assert torch.equal(output[rows], value)
        assert bool((output[labels == -100] == 0).all())
    assert torch.equal(h.grad[rows], h1.grad)
    assert bool((h.grad[labels == -100] == 0).all())
    assert torch.equal(w.grad, w1.grad)


def test_counted_rows_do_not_wait_for_the_device() -> None:
    hidden, weight, labels, upstream = tensors(0.5)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    head(h, w, labels, upstream, counted_rows=TOKENS // 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        head(h, w, labels, upstream, counted_rows=TOKENS // 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_counted_rows_in_a_cuda_graph() -> None:
    hidden, weight, labels, _ = tensors(0.5)
    with torch.no_grad():
        expected = linear_cross_entropy(hidden, weight, labels, counted_rows=TOKENS // 2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear_cross_entropy(hidden, weight, labels, counted_rows=TOKENS // 2)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
