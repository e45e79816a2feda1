"""The fused computation runs as the forward of a real call: hooks run once, and nothing is left on the layer."""

import functools

import pytest
import torch
from torch import nn

from mcore_fused.errors import UnsupportedConfigError, UnsupportedOutputLayerError
from mcore_fused.head.deferred import DeferredLogits, deferred_output_layer
from mcore_fused.head.fsdp import check_gathered, is_shard, is_sharding_hook, owned_by_unit
from mcore_fused.head.layer_call import call_with_layer_hooks


class Layer(nn.Module):
    """What the call reads of a stock output layer."""

    sequence_parallel = gather_output = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ (self.weight if weight is None else weight).T, None


ARGUMENTS = {"weight": None, "runtime_gather_output": None}


def product(hidden, weight):
    logits = hidden @ weight.T
    return logits.amax(-1), logits.logsumexp(-1)


def test_the_computation_takes_what_the_hooks_leave():
    layer, hidden = Layer(), torch.randn(2, 1, 3)
    layer.register_forward_pre_hook(lambda _layer, arguments: (arguments[0] * 2,))
    layer.register_forward_hook(lambda _layer, _arguments, outputs: (outputs[0], outputs[1] + 1))
    largest, normaliser = call_with_layer_hooks(layer, product, hidden, ARGUMENTS)
    expected = product(hidden * 2, layer.weight)
    assert torch.equal(largest, expected[0])
    assert torch.equal(normaliser, expected[1] + 1)


def test_hooks_run_once_for_a_deferred_product():
    layer, hidden, calls = Layer(), torch.randn(2, 1, 3), []
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    with deferred_output_layer(layer):
        logits, _ = layer(hidden)
        assert isinstance(logits, DeferredLogits)
        assert not calls
        logits.call_with_layer_hooks(product)
        assert calls == ["before", "after"]


def test_the_given_weight_is_used():
    layer, hidden, other = Layer(), torch.randn(2, 1, 3), torch.randn(5, 3)
    found = call_with_layer_hooks(layer, product, hidden, ARGUMENTS | {"weight": other})
    assert all(map(torch.equal, found, product(hidden, other)))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_layer_is_what_it_was(compiled):
    layer, hidden = Layer(), torch.randn(2, 1, 3)
    if compiled:
        layer.compile(backend="eager")
    before = dict(vars(layer))

    def fail(_hidden, _weight):
        raise LookupError("no")

    with deferred_output_layer(layer):
        logits, _ = layer(hidden)
        during = dict(vars(layer))
        logits.call_with_layer_hooks(product)
        with pytest.raises(LookupError):
            logits.call_with_layer_hooks(fail)
        assert vars(layer) == during
    assert vars(layer) == before


def test_outputs_that_a_hook_rounds_are_refused():
    """A mixed-precision policy with an output_dtype would round log-probs, silently."""
    layer = Layer()
    layer.register_forward_hook(lambda _layer, _arguments, outputs: tuple(output.bfloat16() for output in outputs))
    with pytest.raises(UnsupportedConfigError, match=r"float32 into torch\.bfloat16"):
        call_with_layer_hooks(layer, product, torch.randn(2, 1, 3), ARGUMENTS)


class DTensor(torch.Tensor):
    """A weight of which only the name says that it is a shard."""


class Unit(nn.Linear):
    """A module of somebody's own FSDP."""


def test_what_a_shard_is():
    shard = torch.randn(2, 2).as_subclass(DTensor)
    assert is_shard(shard)
    assert not is_shard(nn.Parameter(torch.randn(2, 2)))
    assert not owned_by_unit(shard, [nn.Linear(2, 2), Unit(2, 2)])
    shard.is_torch_fsdp2_param = True
    assert owned_by_unit(shard, [])


@pytest.mark.parametrize(("shared", "named"), [(True, "reshard_after_forward=False"), (False, "outermost")])
def test_a_shard_inside_the_call_is_refused_with_a_way_out(shared, named):
    with pytest.raises(UnsupportedOutputLayerError, match=named):
        check_gathered(torch.randn(2, 2).as_subclass(DTensor), shared=shared)
    check_gathered(torch.randn(2, 2), shared=shared)


def test_whose_hooks_are_let_through():
    def hook(*_):
        """Of a stranger."""

    assert not is_sharding_hook(hook)
    assert not is_sharding_hook(functools.partial(hook, 1))
    for module in (
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp",
    ):
        hook.__module__ = module
        assert is_sharding_hook(functools.partial(functools.partial(hook, 1), 2))
    hook.__module__ = "torch.distributed.fsdpx"
    assert not is_sharding_hook(hook)
