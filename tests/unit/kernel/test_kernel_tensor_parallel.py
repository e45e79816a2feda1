"""Three gloo ranks with unequal vocabulary shards equal one rank with the whole vocabulary (K10, the kernel's part)."""

import itertools
import socket
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = (8, 33, 2)
TOKENS, WIDTH = 9, 5


def _inputs(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, dtype=dtype), torch.randn(sum(SIZES), WIDTH, dtype=dtype)
    labels = torch.tensor([-100, 99, 0, 1, 2, 3, 7, 12, -100])  # nobody owns 99; the last rank owns none
    return hidden, weight, labels, torch.randn(TOKENS, dtype=torch.float64), torch.randn(TOKENS, dtype=torch.float64)


def _folded_alike(hidden, weight, labels, place, backend):
    """The folded loss with a shard's place told and asked for: bit-equal, gradients included."""
    from mcore_fused.kernel.policy_loss import PolicyLoss, fused_linear_policy_loss

    policy, results = PolicyLoss("policy_gradient", entropy_coefficient=0.1), []
    labels = torch.where(labels == 99, 4, labels)
    for told in (None, place):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        output = fused_linear_policy_loss(
            h,
            w,
            labels,
            torch.ones(TOKENS),
            policy,
            tp_group=dist.group.WORLD,
            vocab_shard=told,
            backend=backend,
            logits_bytes=1,
        )
        output.loss.backward()
        results.append((output.loss.detach(), output.log_probs, h.grad, w.grad))
    assert all(torch.equal(asked, told) for asked, told in zip(*results, strict=True))


def _counted_alike(hidden, weight, labels, place, backend):
    """Only the rows that count, on every rank the same ones: outputs and gradients of all rows, within rounding."""
    from mcore_fused.kernel import linear_cross_entropy

    labels, results = torch.where(labels == 99, 4, labels), []
    for counted in (None, 7):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = linear_cross_entropy(
            h, w, labels, tp_group=dist.group.WORLD, vocab_shard=place, counted_rows=counted, backend=backend
        )
        torch.autograd.backward(outputs, [torch.ones(TOKENS, dtype=o.dtype) for o in outputs])
        results.append([*(o.detach() for o in outputs), h.grad, w.grad])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def _rank(rank: int, port: int) -> None:
    warnings.filterwarnings("ignore", module="triton.runtime.interpreter")
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(SIZES))
    from mcore_fused.errors import CallArgumentError
    from mcore_fused.kernel import linear_cross_entropy
    from mcore_fused.kernel.reference import reference_linear_cross_entropy

    first = sum(SIZES[:rank])
    mine = slice(first, first + SIZES[rank])
    for dtype, backend, tolerance in ((torch.float64, "torch", 1e-12), (torch.float32, "triton", 1e-5)):
        hidden, weight, labels, g1, g2 = _inputs(dtype)
        g1[1] = 0.0  # the poisoned row's log-prob is not used
        # 39: one padding row on the middle rank, and the last rank is padding only
        settings = itertools.product((None, 40), (True, False), (None, (first, sum(SIZES))))
        for vocab_size, reduce_hidden_grad, place in settings:
            h, w = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
            rh, rw = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            got = linear_cross_entropy(
                h,
                w,
                labels,
                0.7,
                tp_group=dist.group.WORLD,
                vocab_size=vocab_size,
                vocab_shard=place,
                backend=backend,
                reduce_hidden_grad=reduce_hidden_grad,
                workspace_bytes=0,
            )
            want = reference_linear_cross_entropy(rh, rw, labels, 0.7, vocab_size=vocab_size)
            torch.testing.assert_close(
                [o.double() for o in got], list(want), rtol=tolerance, atol=tolerance, equal_nan=True
            )
            torch.autograd.backward(got, [g1.to(got[0].dtype), g2.to(got[1].dtype)])
            torch.autograd.backward(want, [g1, g2])
            if not reduce_hidden_grad:
                assert not torch.allclose(h.grad, rh.grad)
                dist.all_reduce(h.grad)
            torch.testing.assert_close(h.grad, rh.grad, rtol=10 * tolerance, atol=10 * tolerance)
            torch.testing.assert_close(w.grad, rw.grad[mine], rtol=10 * tolerance, atol=10 * tolerance)
            everyone = [torch.empty_like(got[0]) for _ in SIZES]
            dist.all_gather(everyone, got[0].detach())
            assert all(torch.equal(everyone[0].nan_to_num(), other.nan_to_num()) for other in everyone)
        _folded_alike(hidden, weight[mine], labels, (first, sum(SIZES)), backend)
        _counted_alike(hidden, weight[mine], labels, (first, sum(SIZES)), backend)
        empty = linear_cross_entropy(hidden[:0], weight[mine], labels[:0], tp_group=dist.group.WORLD, backend=backend)
        assert empty[0].shape == (0,)
        place = {"vocab_shard": (first, sum(SIZES))}
        refused = ((99, {"check_labels": True}), (0, {"vocab_size": sum(SIZES) + 1}))
        for bad, options in (*refused, *((bad, options | place) for bad, options in refused)):
            with pytest.raises(CallArgumentError):
                linear_cross_entropy(
                    hidden[:1], weight[mine], torch.tensor([bad]), tp_group=dist.group.WORLD, backend=backend, **options
                )
    lonely = dist.new_group([0])
    if rank == 0:
        alone = linear_cross_entropy(hidden, weight, labels, tp_group=lonely)
        torch.testing.assert_close(alone, linear_cross_entropy(hidden, weight, labels), equal_nan=True)
    else:
        with pytest.raises(CallArgumentError, match="not a member"):
            linear_cross_entropy(hidden, weight, labels, tp_group=lonely)
    dist.destroy_process_group()


def test_k10_unequal_shards_equal_the_whole_vocabulary(interpreter) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (port,), nprocs=len(SIZES))


@pytest.mark.parametrize("place", [(-1, 9), (5, 9), (0, 4)])
def test_a_shard_that_does_not_fit_its_vocabulary_is_refused(place) -> None:
    from mcore_fused.errors import CallArgumentError
    from mcore_fused.kernel import linear_cross_entropy

    hidden, weight, labels, *_ = _inputs(torch.float32)
    with pytest.raises(CallArgumentError, match="vocab_shard"):
        linear_cross_entropy(hidden, weight[:5], labels, vocab_shard=place)
    assert linear_cross_entropy(hidden, weight[:5], labels, vocab_shard=(0, 5))[0].shape == (TOKENS,)
