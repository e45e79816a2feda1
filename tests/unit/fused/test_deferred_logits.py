"""The handle that stands for logits: a number multiplies it, everything else is refused by name."""

import operator
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mcore_fused.errors import DeferredLogitsError
from mcore_fused.head.deferred import DeferredForward, DeferredLogits, deferred_output_layer, stock_output_layer


class OneRank:
    """A tensor-parallel group of one."""

    def size(self):
        return 1


class Layer(nn.Module):
    """What the handle reads of a stock output layer."""

    tp_group = OneRank()

    def __init__(self, weight=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3)) if weight else None
        self.sequence_parallel = False
        self.gather_output = False

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ self.weight.T, None


@pytest.fixture
def handle():
    layer = Layer()
    return DeferredLogits(torch.randn(2, 1, 3), layer.weight, layer, sequence_parallel=False)


@pytest.mark.parametrize("factor", [3, 0.5, -2.0, np.float32(0.5), torch.tensor(2.0), torch.tensor([[0.25]])])
def test_numbers_multiply_the_scale(handle, factor):
    number = float(factor)
    assert (handle * factor).scale == number
    assert (2 * (handle * factor)).scale == 2 * number
    assert handle.scale == 1.0
    assert (handle * factor).hidden is handle.hidden


@pytest.mark.parametrize(
    ("factor", "named"),
    [
        (torch.ones(7), "Tensor"),
        (torch.ones(2), "Tensor"),
        (torch.tensor(2.0, requires_grad=True), "Tensor"),
        (True, "bool"),
        ("2", "str"),
        (None, "NoneType"),
        (1j, "complex"),
    ],
)
def test_other_factors_are_refused(handle, factor, named):
    """A learned multiplier would get no gradient, a vector has no place in one number."""
    with pytest.raises(DeferredLogitsError, match=f"multiplication by a {named}"):
        handle * factor


OPERATORS = {
    "__add__": lambda x: x + 1,
    "__radd__": lambda x: 1 + x,
    "__sub__": lambda x: x - 1,
    "__rsub__": lambda x: 1 - x,
    "__truediv__": lambda x: x / 2,
    "__rtruediv__": lambda x: 2 / x,
    "__floordiv__": lambda x: x // 2,
    "__mod__": lambda x: x % 2,
    "__pow__": lambda x: x**2,
    "__rpow__": lambda x: 2**x,
    "__matmul__": lambda x: x @ x,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": abs,
    "__invert__": operator.invert,
    "__and__": lambda x: x & 1,
    "__or__": lambda x: x | 1,
    "__xor__": lambda x: x ^ 1,
    "__lt__": lambda x: x < 1,
    "__le__": lambda x: x <= 1,
    "__gt__": lambda x: x > 1,
    "__ge__": lambda x: x >= 1,
    "__eq__": lambda x: x == 1,
    "__ne__": lambda x: x != 1,
    "__getitem__": lambda x: x[0],
    "__setitem__": lambda x: operator.setitem(x, 0, 1),
    "__iter__": iter,
    "__len__": len,
    "__bool__": bool,
    "__float__": float,
    "__int__": int,
    "__index__": operator.index,
    "__contains__": lambda x: 1 in x,
    "__iadd__": lambda x: operator.iadd(x, 1),
    "__isub__": lambda x: operator.isub(x, 1),
    "__imul__": lambda x: operator.imul(x, 1),
    "__itruediv__": lambda x: operator.itruediv(x, 1),
    "__array__": np.asarray,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_refused_by_name(handle, name):
    with pytest.raises(DeferredLogitsError, match=rf"operator {name}") as caught:
        OPERATORS[name](handle)
    assert isinstance(caught.value, TypeError)
    assert "run unfused" in caught.value.next_step


@pytest.mark.parametrize("name", ["shape", "float", "transpose", "dtype", "argmax"])
def test_attributes_and_methods_are_refused_by_name(handle, name):
    with pytest.raises(DeferredLogitsError, match=f"attribute or method '{name}'"):
        getattr(handle, name)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (torch.softmax, "softmax"),
        (torch.argmax, "argmax"),
        (lambda x, dim: torch.argmax(x, dim=0), "argmax"),
        (lambda x, dim: torch.cat([x, x], dim), "cat"),
    ],
)
def test_torch_functions_are_refused_by_name(handle, call, named):
    with pytest.raises(DeferredLogitsError, match=f"torch function '{named}'"):
        call(handle, -1) if call is not torch.argmax else torch.argmax(handle, -1, True)


def test_protocols_are_asked_as_usual(handle):
    """Pickle, copy and numpy look for optional methods, and must be told that there are none."""
    assert not hasattr(handle, "__array_interface__")
    assert not hasattr(handle, "__deepcopy__")
    assert hash(handle) == hash(handle)


def test_a_pickle_holds_what_stands_in_for_the_logits(handle):
    with pytest.raises(DeferredLogitsError, match="pickling"):
        pickle.dumps(handle)
    seen = []

    def payload(logits):
        seen.append(logits)
        return {"log_probs": torch.zeros(1)}

    layer = handle.layer
    with deferred_output_layer(layer, payload):
        logits, bias = layer(handle.hidden)
    assert bias is None
    assert pickle.loads(pickle.dumps(logits)) == {"log_probs": torch.zeros(1)}
    assert seen == [logits] or seen[0] is logits


def test_the_largest_logit_and_its_column(handle):
    """MTP's acceptance count of 0.19 asks for them, by method and by function."""
    expected = ((handle.hidden @ handle.weight.T) * 0.5).max(dim=-1)
    values, columns = (handle * 0.5).max(dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)
    assert torch.equal(torch.argmax(handle * 0.5, dim=-1), expected.indices)
    with pytest.raises(DeferredLogitsError, match="max over dimension 0 of sharded logits"):
        handle.max(dim=0)


def test_size_only_over_the_vocabulary(handle):
    assert handle.size(-1) == handle.size(2) == 7
    for dim in (0, 1, -2):
        with pytest.raises(DeferredLogitsError, match=f"size of dimension {dim}"):
            handle.size(dim)


def test_a_deferred_layer_is_stock_again_afterwards_and_in_between():
    layer, hidden = Layer(), torch.randn(2, 1, 3)
    expected, _ = layer(hidden)
    with deferred_output_layer(layer):
        logits, _ = layer(hidden)
        assert isinstance(logits, DeferredLogits)
        assert logits.weight is None
        with stock_output_layer(layer):
            assert torch.equal(layer(hidden)[0], expected)
        assert isinstance(layer(hidden)[0], DeferredLogits)
    assert "forward" not in vars(layer)
    with stock_output_layer(layer):
        assert "forward" not in vars(layer)
    assert torch.equal(layer(hidden)[0], expected)


def test_what_the_layer_is_given_decides():
    layer, hidden, other = Layer(), torch.randn(2, 1, 3), torch.randn(7, 3)
    layer.sequence_parallel = True
    forward = DeferredForward(layer, None)
    assert forward(hidden, other)[0].weight is other
    assert forward(hidden)[0].sequence_parallel is True
    assert forward(hidden)[0].gathered is False
    assert forward(hidden, None, True)[0].gathered is True
    layer.gather_output = True
    assert forward(hidden)[0].gathered is True
    assert forward(hidden, None, False)[0].gathered is False


def test_new_arguments_of_the_layer():
    """An argument that is None says nothing; one that says something must not be lost."""
    forward = DeferredForward(Layer(), None)
    assert isinstance(forward(torch.randn(2, 1, 3), precision=None)[0], DeferredLogits)
    with pytest.raises(DeferredLogitsError, match="unknown arguments: precision"):
        forward(torch.randn(2, 1, 3), precision="fp8", other=None)


def test_a_layer_without_a_weight_must_be_given_one():
    with pytest.raises(DeferredLogitsError, match="no weight of its own"):
        DeferredForward(Layer(weight=False), None)(torch.randn(2, 1, 3))
