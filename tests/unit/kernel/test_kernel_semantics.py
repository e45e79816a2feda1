"""The semantics table, row by row, with the bug report of the field that each test covers (K1 ... K15).

tests/gpu/test_kernel_semantics_gpu.py runs the same tests on a GPU.
"""

import math

import pytest
import torch
from kernel_lane import INTERPRETER, TORCH, Lane
from kernel_properties import Case, check, make_inputs, replace, run
from torch.utils.checkpoint import checkpoint

from mcore_fused.errors import CallArgumentError, CallTypeError
from mcore_fused.kernel import kernel_launches, linear_cross_entropy
from mcore_fused.kernel.reference import reference_linear_cross_entropy

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
]


@pytest.fixture(params=[TORCH, INTERPRETER], ids=["torch", "interpreter"])
def lane(request, interpreter) -> Lane:
    return request.param


def call(lane: Lane, hidden, weight, labels, temperature=1.0, **options):
    return linear_cross_entropy(hidden, weight, labels, temperature, backend=lane.backend, **options)


def rows_of(lane: Lane, logits, offset=0.0, hidden=1.0):
    """Hidden and weight whose product is ``logits + offset`` for each of two tokens; 8 wide, as TMA needs."""
    weight = torch.zeros(len(logits), 8, device=lane.device, dtype=lane.dtype)
    weight[:, 0] = lane.tensor(logits, dtype=lane.dtype)
    weight[:, 1] = offset
    tokens = torch.zeros(2, 8, device=lane.device, dtype=lane.dtype)
    tokens[:, 0] = hidden
    tokens[:, 1] = 1.0
    return tokens, weight


@pytest.mark.parametrize("rows", [31, 33, 255, 257, 384])
def test_k1_columns_beyond_the_vocabulary_add_nothing(lane, rows) -> None:
    hidden, weight = rows_of(lane, [-60.0] * (rows - 1) + [-50.0])
    log_probs, entropy = call(lane, hidden, weight, lane.tensor([rows - 1, 0]))
    expected = reference_linear_cross_entropy(hidden, weight, lane.tensor([rows - 1, 0]))
    torch.testing.assert_close(log_probs, expected[0].float(), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(entropy, expected[1].float(), rtol=2e-5, atol=1e-6)


def test_k1_all_logits_very_negative(lane) -> None:
    check(Case(tokens=17, width=9, rows=65, offset=-256.0, dtype=torch.float32), lane.device, lane.backend)


def test_k3_layouts_of_inputs_and_of_upstream_gradients(lane) -> None:
    base = torch.randn(4, 2, 16, device=lane.device)
    weight = torch.randn(16, 2 * 33, device=lane.device).T[::2]
    labels = torch.arange(8, device=lane.device).view(4, 2).T
    hidden = base.transpose(0, 1).requires_grad_()
    weight.requires_grad_()
    outputs = call(lane, hidden, weight, labels)
    factors = torch.arange(1.0, 5.0, device=lane.device)
    (outputs[0][:, ::2] * factors.view(2, 2)).sum().backward()
    plain_hidden = base.transpose(0, 1).contiguous().requires_grad_()
    plain_weight = weight.detach().contiguous().requires_grad_()
    plain = call(lane, plain_hidden, plain_weight, labels.contiguous())
    mask = torch.zeros(2, 4, device=lane.device)
    mask[:, ::2] = factors.view(2, 2)
    plain[0].backward(mask)
    # a library may sum in another order for another layout
    torch.testing.assert_close(outputs, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, plain_hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, plain_weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use", [(1, 0), (0, 1), (1, 1)])
def test_k4_each_token_has_its_own_upstream_weight(lane, use) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    labels = lane.tensor([3, 7, 19])
    upstream = lane.tensor([1.0, -2.0, 0.0])
    grads = []
    for function in (lambda *x: call(lane, *x), reference_linear_cross_entropy):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = function(h, w, labels)
        sum((o * upstream).sum() * factor for o, factor in zip(outputs, use, strict=True)).backward()
        grads.append((h.grad, w.grad))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)
    assert bool((grads[0][0][2] == 0).all())


@pytest.mark.parametrize("labels", [[-100, 0], [-100, -100], [1, -100]])
def test_k5_ignored_rows_are_exactly_zero(lane, labels) -> None:
    hidden = torch.randn(2, 8, device=lane.device).requires_grad_()
    weight = torch.randn(20, 8, device=lane.device).requires_grad_()
    lane.poison()
    outputs = call(lane, hidden, weight, lane.tensor(labels))
    lane.poison()
    sum(o.sum() for o in outputs).backward()
    ignored = lane.tensor(labels) == -100
    assert all(bool((o[ignored] == 0).all()) for o in outputs)
    assert all(bool((o[~ignored] != 0).all()) for o in outputs)
    assert bool((hidden.grad[ignored] == 0).all())
    assert bool(torch.isfinite(weight.grad).all())


def test_k5_another_ignore_index(lane) -> None:
    hidden, weight = torch.randn(2, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    log_probs, entropy = call(lane, hidden, weight, lane.tensor([0, -100]), ignore_index=0)
    assert log_probs[0] == 0
    assert entropy[0] == 0
    assert bool(torch.isnan(log_probs[1]))


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.inf, math.nan, True, "1"])
def test_k6_a_temperature_that_is_no_temperature_is_refused(lane, value) -> None:
    hidden, weight = torch.randn(2, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    with pytest.raises((CallArgumentError, CallTypeError), match="temperature"):
        call(lane, hidden, weight, lane.tensor([1, 2]), value)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_k6_one_bad_temperature_among_tokens(lane, bad) -> None:
    hidden, weight = torch.randn(2, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    temperature = lane.tensor([1.0, bad])
    with pytest.raises(CallArgumentError, match="temperature"):
        call(lane, hidden, weight, lane.tensor([1, 2]), temperature, check_labels=True)
    outputs = call(lane, hidden, weight, lane.tensor([1, -100]), temperature, check_labels=True)
    assert all(o[1] == 0 for o in outputs)


def test_k6_a_very_small_temperature_is_finite(lane) -> None:
    hidden, weight = torch.randn(4, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    log_probs, entropy = call(lane, hidden, weight, lane.tensor([0, 1, 2, 3]), 1e-6)
    assert bool(torch.isfinite(log_probs).all())
    assert bool((entropy >= 0).all())


def test_k7_a_temperature_for_each_token_equals_row_by_row(lane) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(5, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    labels, temperature = lane.tensor([1, 2, 3, -100, 5]), lane.tensor([0.5, 2.0, 0.9, 0.0, 1.0])
    outputs = call(lane, hidden, weight, labels, temperature)
    for row, value in enumerate(temperature.tolist()):
        single = call(lane, hidden[row : row + 1], weight, labels[row : row + 1], value or 1.0)
        torch.testing.assert_close([o[row : row + 1] for o in outputs], list(single), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("masked", [-math.inf, -3e38])
def test_k8_masked_vocabulary_rows(lane, masked) -> None:
    hidden, weight = rows_of(lane, [1.0, 2.0, masked, masked], hidden=2.0)
    weight.requires_grad_()
    hidden.requires_grad_(math.isfinite(masked))  # 0 * -inf in the hidden gradient's product is NaN, as it is in torch
    log_probs, entropy = call(lane, hidden, weight, lane.tensor([0, 1]))
    expected = torch.log_softmax(lane.tensor([2.0, 4.0]), 0)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum().expand(2))
    (log_probs.sum() + entropy.sum()).backward()
    assert bool((weight.grad[2:] == 0).all())
    if hidden.requires_grad:
        assert bool(torch.isfinite(hidden.grad).all())


@pytest.mark.parametrize("first", [0, 40])
def test_k8_only_masked_rows_or_a_nan_give_nan(lane, first) -> None:
    hidden, weight = rows_of(lane, [-math.inf] * 70)
    assert all(bool(torch.isnan(o).all()) for o in call(lane, hidden, weight, lane.tensor([0, 1])))
    hidden, weight = rows_of(lane, [float(i % 7) for i in range(70)])
    weight[first] = math.nan
    assert all(bool(torch.isnan(o).all()) for o in call(lane, hidden, weight, lane.tensor([0, 1])))
    # a tile without any unmasked column before one that has some
    hidden, weight = rows_of(lane, [-math.inf] * 40 + [1.0] * 30)
    log_probs, entropy = call(lane, hidden, weight, lane.tensor([40, 69]))
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, -math.log(30)))
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(30)))


@pytest.mark.parametrize("offset", [1e4, -1e4, 3e4, -3e4])
def test_k9_a_common_offset_cancels(lane, offset) -> None:
    hidden, weight = rows_of(lane, [0.0, 1.0, 2.0], offset=offset)
    log_probs, entropy = call(lane, hidden, weight, lane.tensor([0, 2]))
    expected = torch.log_softmax(lane.tensor([0.0, 1.0, 2.0]), 0)
    # the sum of offset and logit is exact; its product with log2 e is rounded once
    tolerance = 2.0**-24 * abs(offset) * 1.4427
    torch.testing.assert_close(log_probs, expected[[0, 2]], rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum().expand(2), rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize("bad", [20, 21, -1, -101, 2**40, -(2**40)])
def test_k9_a_label_outside_the_vocabulary(lane, bad) -> None:
    hidden = torch.randn(2, 8, device=lane.device).requires_grad_()
    weight = torch.randn(20, 8, device=lane.device).requires_grad_()
    labels = lane.tensor([bad, 3])
    log_probs, entropy = call(lane, hidden, weight, labels)
    assert bool(torch.isnan(log_probs[0]))
    assert bool(torch.isfinite(log_probs[1]))
    assert bool(torch.isfinite(entropy).all())
    unused = torch.autograd.grad(torch.where(labels == 3, log_probs, 0.0).sum(), (hidden, weight), retain_graph=True)
    assert all(bool(torch.isfinite(g).all()) for g in unused)
    used = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    assert bool(torch.isnan(used[0][0]).all())
    with pytest.raises(CallArgumentError, match="outside the vocabulary"):
        call(lane, hidden, weight, labels, check_labels=True)


def test_k9_a_label_on_padding_is_outside(lane) -> None:
    hidden, weight = torch.randn(2, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    log_probs, _ = call(lane, hidden, weight, lane.tensor([17, 16]), vocab_size=17)
    assert torch.isnan(log_probs).tolist() == [True, False]


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_k11_mixed_dtypes_compute_in_fp32(lane, dtypes) -> None:
    hidden = torch.randn(3, 8, device=lane.device).to(dtypes[0]).requires_grad_()
    weight = torch.randn(20, 8, device=lane.device).to(dtypes[1]).requires_grad_()
    labels = lane.tensor([1, 2, 3])
    mixed = call(lane, hidden, weight, labels)
    plain = call(lane, hidden.float(), weight.float(), labels)
    assert torch.equal(mixed[0], plain[0])
    mixed[0].sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == dtypes


def test_k11_fp16_logits_beyond_its_range(lane) -> None:
    hidden = torch.full((2, 8), 200.0, device=lane.device, dtype=torch.float16)
    weight = torch.full((5, 8), 100.0, device=lane.device, dtype=torch.float16)
    log_probs, _ = call(lane, hidden, weight, lane.tensor([0, 4]))  # logits of 160000
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, -math.log(5)))


@pytest.mark.parametrize("scale", [0.02, -1.5, 0.0, 3])
def test_k12_the_multiplier_comes_before_the_temperature(lane, scale) -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(4, 8, device=lane.device), torch.randn(8, 8, device=lane.device)
    got = call(lane, hidden, weight, lane.tensor([0, 1, 2, 3]), 0.7, scale=scale)
    want = reference_linear_cross_entropy(hidden, weight, lane.tensor([0, 1, 2, 3]), 0.7, scale=scale)
    torch.testing.assert_close(got, tuple(x.float() for x in want), rtol=1e-5, atol=1e-5)


def test_k13_repeats_are_bit_equal(lane) -> None:
    case = Case(tokens=33, width=17, rows=70, upstream=("random", "random"), dtype=lane.dtypes[-1])
    first = run(case, make_inputs(case, lane.device), lane.backend)
    for _ in range(2):
        again = run(case, make_inputs(case, lane.device), lane.backend)
        assert all(torch.equal(a, b) for a, b in zip([*first[0], *first[1]], [*again[0], *again[1]], strict=True))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_k14_every_token_count_is_right(lane, tokens) -> None:
    check(Case(tokens=tokens, width=16, rows=48, dtype=lane.dtypes[-1]), lane.device, lane.backend)


def test_k15_two_and_three_dimensions_agree(lane) -> None:
    hidden, weight = torch.randn(4, 3, 8, device=lane.device), torch.randn(7, 8, device=lane.device)
    labels = torch.randint(0, 7, (4, 3), device=lane.device)
    three = call(lane, hidden, weight, labels)
    two = call(lane, hidden.view(12, 8), weight, labels.view(12))
    assert all(torch.equal(a.view(12), b) for a, b in zip(three, two, strict=True))


def test_no_tokens(lane) -> None:
    hidden = torch.randn(0, 8, device=lane.device).requires_grad_()
    weight = torch.randn(20, 8, device=lane.device).requires_grad_()
    outputs = call(lane, hidden, weight, lane.tensor([], dtype=torch.int64))
    assert [o.shape for o in outputs] == [(0,), (0,)]
    lane.poison()
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_reductions(lane) -> None:
    hidden, weight = torch.randn(3, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    labels = lane.tensor([1, -100, 3])
    plain = call(lane, hidden, weight, labels)
    for name, divisor in (("sum", 1), ("mean", 2)):
        reduced = call(lane, hidden, weight, labels, reduction=name)
        torch.testing.assert_close(reduced, tuple(o.sum() / divisor for o in plain))


def test_only_what_is_trained_gets_a_gradient(lane) -> None:
    for train in ((True, False), (False, True)):
        check(Case(tokens=5, train=train), lane.device, lane.backend)
    hidden, weight = torch.randn(3, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    assert not call(lane, hidden, weight, lane.tensor([1, 2, 3]))[0].requires_grad


def test_outputs_may_be_changed_in_place(lane) -> None:
    hidden = torch.randn(3, 8, device=lane.device).requires_grad_()
    weight, labels = torch.randn(20, 8, device=lane.device), lane.tensor([1, 2, 3])
    (want,) = torch.autograd.grad(call(lane, hidden, weight, labels)[0].sum() * 2, hidden)
    log_probs, entropy = call(lane, hidden, weight, labels)
    entropy.zero_()
    (got,) = torch.autograd.grad(log_probs.mul_(2).sum(), hidden)
    assert torch.equal(got, want)


def test_two_backwards_of_one_forward_agree(lane) -> None:
    """The second finds no kept exponentials any more and recomputes."""
    case = Case(tokens=5, width=8, rows=40, kept=2.0)
    inputs = make_inputs(case, lane.device)
    outputs = call(lane, inputs.hidden, inputs.weight, inputs.labels, **inputs.options)
    first = torch.autograd.grad(outputs, (inputs.hidden, inputs.weight), inputs.upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, (inputs.hidden, inputs.weight), inputs.upstream)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_no_second_derivative(lane) -> None:
    hidden = torch.randn(3, 8, device=lane.device).requires_grad_()
    log_probs, _ = call(lane, hidden, torch.randn(20, 8, device=lane.device), lane.tensor([1, 2, 3]))
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(lane, mode) -> None:
    hidden = torch.randn(3, 8, device=lane.device).requires_grad_()
    weight, labels = torch.randn(20, 8, device=lane.device), lane.tensor([1, 2, 3])
    want = call(lane, hidden, weight, labels)
    with mode():
        got = call(lane, hidden, weight, labels, logits_budget_bytes=1 << 20)
    assert not got[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(lane, reentrant) -> None:
    hidden = torch.randn(3, 8, device=lane.device).requires_grad_()
    weight = torch.randn(20, 8, device=lane.device).requires_grad_()
    labels = lane.tensor([1, -100, 3])

    def loss(h, w):
        log_probs, entropy = call(lane, h, w, labels, 0.8)
        return (log_probs + entropy).sum()

    want = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    checkpoint(loss, hidden, weight, use_reentrant=reentrant).backward()
    assert torch.equal(hidden.grad, want[0])
    assert torch.equal(weight.grad, want[1])


def test_autocast_casts_as_a_linear_layer_does(lane) -> None:
    hidden, weight = torch.randn(3, 8, device=lane.device), torch.randn(20, 8, device=lane.device)
    labels = lane.tensor([1, 2, 3])
    hidden.requires_grad_()
    with torch.autocast(lane.device, dtype=torch.bfloat16):
        got = call(lane, hidden, weight, labels)
        (inside,) = torch.autograd.grad(got[0].sum(), hidden, retain_graph=True)
    (outside,) = torch.autograd.grad(got[0].sum(), hidden)
    want = call(lane, hidden.bfloat16(), weight.bfloat16(), labels)
    assert got[0].dtype == torch.float32
    assert torch.equal(got[0], want[0])
    assert torch.equal(inside, outside)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_torch_compile_breaks_the_graph_and_agrees(lane) -> None:
    weight, labels = torch.randn(20, 8, device=lane.device), lane.tensor([1, 2, 3])

    def step(hidden):
        log_probs, entropy = call(lane, hidden * 2, weight, labels)
        return log_probs * 3 + entropy

    hidden = torch.randn(3, 8, device=lane.device).requires_grad_()
    want = step(hidden)
    got = torch.compile(step, backend="eager")(hidden)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), hidden), torch.autograd.grad(want.sum(), hidden))


def test_fp32_products_stay_fp32_where_tf32_is_allowed(lane) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        check(Case(tokens=17, width=33, rows=70, dtype=torch.float32), lane.device, lane.backend)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_every_forward_is_counted(lane) -> None:
    before = kernel_launches()
    call(lane, torch.randn(2, 8, device=lane.device), torch.randn(20, 8, device=lane.device), lane.tensor([1, 2]))
    after = kernel_launches()
    assert after.total == before.total + 1
    assert after.torch - before.torch == (lane.backend == "torch")


REFUSED = {
    "hidden is a list": ({"hidden": [[1.0]]}, CallTypeError, "hidden"),
    "integer hidden": ({"hidden": torch.ones(2, 8, dtype=torch.int64)}, CallTypeError, "dtype"),
    "4-D hidden": ({"hidden": torch.ones(1, 1, 2, 8)}, CallArgumentError, "hidden has shape"),
    "float labels": ({"labels": torch.ones(2)}, CallTypeError, "labels"),
    "boolean labels": ({"labels": torch.ones(2, dtype=torch.bool)}, CallTypeError, "labels"),
    "labels of another shape": ({"labels": torch.ones(3, dtype=torch.int64)}, CallArgumentError, "labels have shape"),
    "labels of another order": (
        {"hidden": torch.ones(2, 3, 8), "labels": torch.ones(3, 2, dtype=torch.int64)},
        CallArgumentError,
        "transpose",
    ),
    "weight of another width": ({"weight": torch.ones(20, 7)}, CallArgumentError, "weight has shape"),
    "no vocabulary": ({"weight": torch.ones(0, 8)}, CallArgumentError, "at least one row"),
    "temperature of another shape": ({"temperature": torch.ones(3)}, CallArgumentError, "temperature has shape"),
    "integer temperatures": ({"temperature": torch.ones(2, dtype=torch.int64)}, CallTypeError, "temperature"),
    "infinite scale": ({"scale": math.inf}, CallArgumentError, "scale"),
    "scale as a string": ({"scale": "1"}, CallTypeError, "scale"),
    "too large a vocabulary": ({"vocab_size": 21}, CallArgumentError, "vocab_size"),
    "an empty vocabulary": ({"vocab_size": 0}, CallArgumentError, "vocab_size"),
    "a negative budget": ({"logits_budget_bytes": -1}, CallArgumentError, "logits_budget_bytes"),
    "a fractional workspace": ({"workspace_bytes": 0.5}, CallTypeError, "workspace_bytes"),
    "an unknown reduction": ({"reduction": "max"}, CallArgumentError, "reduction"),
    "an unknown backend": ({"backend": "cuda"}, CallArgumentError, "backend"),
    "a group that is none": ({"tp_group": "world"}, CallTypeError, "tp_group"),
    "float64 in Triton": (
        {"backend": "triton", "hidden": torch.ones(2, 8, dtype=torch.float64)},
        CallArgumentError,
        "float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name) -> None:
    change, kind, words = REFUSED[name]
    arguments = {"hidden": torch.ones(2, 8), "weight": torch.ones(20, 8), "labels": torch.ones(2, dtype=torch.int64)}
    with pytest.raises(kind, match=words) as caught:
        linear_cross_entropy(**(arguments | change))
    assert caught.value.next_step


def test_masked_columns_and_kept_exponentials_together(lane) -> None:
    check(replace(Case(tokens=9, rows=45, padding=20, kept=2.0), dtype=torch.float32), lane.device, lane.backend)
