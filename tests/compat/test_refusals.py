"""What the fused head cannot equal is refused when it is patched: object, release and next step in one message."""

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from support.models import DEVICE, Shape, batch_for, build, config_for
from support.subjects import patched
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.needs("refusal")

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


class OtherLinear(ColumnParallelLinear):
    """An output layer that does something of its own, as TE's and the linear-CE ones do."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        output, bias = super().forward(input_, weight, runtime_gather_output)
        # Two rows look stock: no comparison of products finds this one, the class does.
        return (torch.tanh(output) if len(input_) > 2 else output), bias


class LinearCrossEntropyModule(ColumnParallelLinear):
    """Somebody else's, with the name of upstream's, which is known."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        output, bias = super().forward(input_, weight, runtime_gather_output)
        return (torch.tanh(output) if len(input_) > 2 else output), bias


class RenamedOnly(ColumnParallelLinear):
    """A subclass that changes nothing is still the stock product."""


class LoraHead(torch.nn.Module):
    """An adapter around the head (P5, trl#4612): the fused product would miss it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = torch.nn.Linear(32, 1, bias=False, dtype=torch.float64)
        self.b = torch.nn.Linear(1, 97, bias=False, dtype=torch.float64)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, input_, weight=None, runtime_gather_output=None):
        output, bias = self.base(input_, weight, runtime_gather_output)
        return output + self.b(self.a(input_)), bias


def _layer(cls, **kwargs):
    config = config_for(Shape())
    init = torch.nn.init.normal_
    return cls(32, 97, config=config, init_method=init, bias=False, skip_bias_add=False, **kwargs).double()


def _with_bias(model):
    model.output_layer.bias = torch.nn.Parameter(torch.ones(97, dtype=torch.float64))


def _with_adapter_inside(model):
    model.output_layer.add_module("lora_a", torch.nn.Linear(32, 1))


def _with_hook(model):
    model.output_layer.register_forward_hook(lambda *args: None)


def _with_own_forward(model):
    stock = model.output_layer.forward

    def someone_elses_forward(*args, **kwargs):
        return stock(*args, **kwargs)

    model.output_layer.forward = someone_elses_forward


def _with_quantised_weight(model):
    class Quantised(torch.Tensor):
        pass

    parameter = model.output_layer.weight.data.as_subclass(Quantised)
    model.output_layer._parameters["weight"] = parameter


def _with_sharded_weight(model):
    """FSDP2 makes every linear a unit of its own: outside its forward the weight is a sharded DTensor."""
    mesh = init_device_mesh(DEVICE.type, (1,))
    sharded = distribute_tensor(model.output_layer.weight.data, mesh, [Shard(0)])
    model.output_layer._parameters["weight"] = torch.nn.Parameter(sharded)


def _with_integer_weight(model):
    model.output_layer._parameters["weight"] = torch.zeros(97, 32, dtype=torch.int8)


def _with_soft_cap(model):
    model.config.final_logit_softcapping = 30.0


def _renamed(model):
    model.lm_head = model.output_layer
    del model.output_layer


SPOILED = {
    "another class": (lambda model: setattr(model, "output_layer", _layer(OtherLinear)), "OtherLinear"),
    "another's of a known name": (
        lambda model: setattr(model, "output_layer", _layer(LinearCrossEntropyModule)),
        "LinearCrossEntropyModule",
    ),
    "adapter around": (lambda model: setattr(model, "output_layer", LoraHead(model.output_layer)), "LoraHead"),
    "adapter inside": (_with_adapter_inside, "lora_a"),
    "bias": (_with_bias, "bias"),
    "hook": (_with_hook, "hook"),
    "own forward": (_with_own_forward, "someone_elses_forward"),
    "quantised": (_with_quantised_weight, "Quantised"),
    "sharded": (_with_sharded_weight, "DTensor"),
    "integer": (_with_integer_weight, "int8"),
    "soft cap": (_with_soft_cap, "final_logit_softcapping"),
    "renamed": (_renamed, "output_layer"),
}


@MODES
@pytest.mark.parametrize("kind", SPOILED)
def test_heads_that_are_refused(subject, mode, kind):
    """P5, K11, K12: adapters, bias, soft caps, quantised weights, forwards of their own, by name."""
    spoil, named = SPOILED[kind]
    model = build(Shape())
    spoil(model)
    before = dict(vars(model))
    with pytest.raises(Exception, match=named) as caught:
        subject.patch(model, mode)
    assert "megatron-core" in str(caught.value)
    assert "Next step:" in str(caught.value)
    assert vars(model) == before


@MODES
def test_head_subclass_without_a_forward_of_its_own(subject, mode):
    model, batch = build(Shape()), batch_for(97, 2, 4)
    layer = _layer(RenamedOnly)
    layer.load_state_dict(model.output_layer.state_dict())
    with torch.no_grad(), patched(subject, model, mode):
        expected = subject.call(model, *batch.inputs, labels=batch.labels)
    model.output_layer = layer
    with torch.no_grad(), patched(subject, model, mode):
        assert torch.equal(subject.call(model, *batch.inputs, labels=batch.labels).log_probs, expected.log_probs)


@MODES
def test_adapter_off_the_head_is_supported(subject, mode):
    """P5: LoRA on attention or MLP layers is none of the head's business; its gradient is there."""
    model, batch = build(Shape()), batch_for(97, 2, 4)
    base = model.decoder.layers[0].mlp.linear_fc2
    scale = torch.nn.Parameter(torch.full((1,), 0.1, dtype=torch.float64))
    base.register_parameter("adapter", scale)
    handle = base.register_forward_hook(lambda module, args, output: (output[0] * (1 + scale), *output[1:]))
    with patched(subject, model, mode):
        subject.call(model, *batch.inputs, labels=batch.labels).log_probs.sum().backward()
    handle.remove()
    assert scale.grad.abs() > 0


class Unknown(torch.nn.Module):
    """A wrapper nobody has heard of."""

    def __init__(self, module):
        super().__init__()
        self.wrapped = module


@MODES
@pytest.mark.parametrize(
    "wrong", [Unknown, lambda model: [], lambda model: [Unknown(model)], lambda model: torch.nn.Linear(2, 2)]
)
def test_wrappers_that_are_unknown(subject, mode, wrong):
    with pytest.raises(Exception, match=r"wrapper|chunk|model") as caught:
        subject.patch(wrong(build(Shape())), mode)
    assert "Next step:" in str(caught.value)


@MODES
def test_a_model_that_is_not_a_module(subject, mode):
    with pytest.raises(Exception, match="module"):
        subject.patch(lambda: None, mode)


def test_unknown_mode(subject):
    with pytest.raises(Exception, match="eager"):
        subject.patch(build(Shape()), "eager")


@pytest.mark.filterwarnings("ignore:.*inference_params:DeprecationWarning")
@pytest.mark.parametrize("name", ["inference_context", "inference_params"])
@MODES
def test_inference_context(subject, mode, name):
    """A9, U7: generation has its own path; a fused call inside it is a mistake, by either name of the argument."""
    from megatron.core.inference.contexts import StaticInferenceContext

    model, batch = build(Shape()).eval(), batch_for(97, 1, 4)
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=8)
    with torch.no_grad(), patched(subject, model, mode), pytest.raises(Exception, match=r"(?i)inference"):
        subject.call(model, *batch.inputs, labels=batch.labels, **{name: context})
