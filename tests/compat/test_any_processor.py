"""Legacy mode gives every output processor the contract of the hook, on releases and models that have no hook."""

import pytest
import torch
from support.models import Shape, batch_for, build, half_chain
from support.models.hybrid import build_hybrid
from support.subjects import patched

from mcore_compat.testing.reference import stock_forward

pytestmark = pytest.mark.needs("patch", "legacy", "library")

# What megatron-core 0.18.0 to 0.19.2 hand over.
KEYWORDS = {
    "attention_mask", "compute_language_model_loss", "config", "context", "decoder_input", "hidden_states",
    "inference_context", "input_ids", "labels", "loss_mask", "output_layer", "output_weight", "packed_seq_params",
    "position_ids", "runtime_gather_output", "scale_logits",
}  # fmt: skip
BATCH = batch_for(97, 2, 5)
CONTEXT = object()


class Processor:
    """Computes logits and loss with what it is handed over, as a processor of a framework would."""

    def __init__(self):
        self.seen = []

    def __call__(self, **hook):
        self.seen.append(hook)
        logits, bias = hook["output_layer"](
            hook["hidden_states"], weight=hook["output_weight"], runtime_gather_output=hook["runtime_gather_output"]
        )
        assert bias is None
        logits = hook["scale_logits"](logits)
        loss = None
        if hook["labels"] is not None:
            loss = hook["compute_language_model_loss"](hook["labels"], logits.clone())
        return {"logits": logits, "loss": loss, "hidden": hook["hidden_states"]}


def _served(subject, model, outer=None, **kwargs):
    """One call in forced legacy mode; the model is afterwards what it was."""
    processor, before = Processor(), [dict(vars(module)) for module in model.modules()]
    with patched(subject, model, "legacy"):
        outer = model if outer is None else outer
        output = outer(*BATCH.inputs, output_processor=processor, output_processor_context=CONTEXT, **kwargs)
    assert [dict(vars(module)) for module in model.modules()] == before
    (hook,) = processor.seen
    assert hook.keys() >= KEYWORDS
    return output, hook


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("labels", [None, BATCH.labels], ids=["without labels", "with labels"])
@pytest.mark.parametrize("make", [build, build_hybrid], ids=["gpt", "hybrid"])
def test_a_processor_gets_what_stock_computes_with(subject, make, labels, tied):
    """Logits and loss of the processor are stock's, to the last bit; everything else is the caller's own object."""
    model = make(Shape(tied=tied))
    with torch.no_grad():
        logits = make(Shape(tied=tied))(*BATCH.inputs)
        loss = None if labels is None else make(Shape(tied=tied))(*BATCH.inputs, labels=labels)
        output, hook = _served(subject, model, labels=labels)
    assert torch.equal(output["logits"].transpose(0, 1), logits)
    assert loss is output["loss"] is None or torch.equal(output["loss"], loss)
    ids, positions, mask = BATCH.inputs
    assert hook["labels"] is labels
    assert (hook["input_ids"] is ids, hook["position_ids"] is positions, hook["attention_mask"] is mask) == (True,) * 3
    assert (hook["context"] is CONTEXT, hook["config"] is model.config) == (True, True)
    assert hook["output_layer"] is model.output_layer
    assert (hook["output_weight"] is not None) == tied
    assert (hook["loss_mask"], hook["inference_context"], hook["packed_seq_params"]) == (None,) * 3


@pytest.mark.needs("mup")
@pytest.mark.since("mup")
def test_a_processor_gets_mups_multiplier(subject):
    with torch.no_grad():
        logits = build(Shape(mup=True))(*BATCH.inputs)
        output, hook = _served(subject, build(Shape(mup=True)), labels=BATCH.labels)
    assert torch.allclose(output["logits"].transpose(0, 1), logits, rtol=1e-14)
    ones = torch.ones(1)
    assert hook["scale_logits"](ones) != ones


@pytest.mark.needs("mtp")
@pytest.mark.since("mtp")
def test_a_processor_gets_the_hidden_states_after_mtp(subject):
    """MTP runs before the head and takes its own part of the hidden states away."""
    extra = {"labels": BATCH.labels, "loss_mask": torch.ones_like(BATCH.labels, dtype=torch.float32)}
    stock = stock_forward(build(Shape(mtp=1)), *BATCH.inputs, **extra)
    output, hook = _served(subject, build(Shape(mtp=1)), **extra)
    assert hook["loss_mask"] is extra["loss_mask"]
    assert torch.allclose(output["logits"], stock.logits, atol=1e-12)


@pytest.mark.since("upstream_hook")
@pytest.mark.parametrize("labels", [None, BATCH.labels], ids=["without labels", "with labels"])
def test_legacy_mode_hands_over_what_the_hook_does(subject, labels):
    """The same keywords with the same values, embeddings included."""
    native, model = Processor(), build(Shape())
    with torch.no_grad():
        build(Shape())(*BATCH.inputs, labels=labels, output_processor=native, output_processor_context=CONTEXT)
        _, served = _served(subject, model, labels=labels)
    (native,) = native.seen
    assert served.keys() == native.keys()
    for name, value in native.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(served[name], value), name
        elif name not in {"output_layer", "config", "compute_language_model_loss", "scale_logits"}:
            assert served[name] is value, name


@pytest.mark.parametrize("labels", [None, BATCH.labels], ids=["without labels", "with labels"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_processor_that_returns_hidden_states(subject, labels, wrapped):
    """For a framework's own chunked head: the hidden states come out through the wrappers, with their graph."""
    shape = Shape(dtype=torch.bfloat16 if wrapped else torch.float64)
    model = build(shape)
    with torch.no_grad():
        logits = build(shape)(*BATCH.inputs).transpose(0, 1)
    with patched(subject, model, "legacy"):
        outer = half_chain(model) if wrapped else model
        hidden = outer(*BATCH.inputs, labels=labels, output_processor=lambda **hook: hook["hidden_states"])
    assert tuple(hidden.shape) == (5, 2, 32)
    product, _ = model.output_layer(hidden.to(shape.dtype))
    assert torch.equal(product, logits)
    hidden.sum().backward()
    weight = model.embedding.word_embeddings.weight
    assert (weight.main_grad if wrapped else weight.grad).any()


def test_a_processor_that_fails_leaves_nothing_behind(subject):
    model = build(Shape())
    before = [dict(vars(module)) for module in model.modules()]

    def failing(**_):
        raise LookupError("of the processor")

    with torch.no_grad(), patched(subject, model, "legacy"):
        during = [dict(vars(module)) for module in model.modules()]
        for labels in (None, BATCH.labels):
            with pytest.raises(LookupError, match="of the processor"):
                model(*BATCH.inputs, labels=labels, output_processor=failing)
            assert [dict(vars(module)) for module in model.modules()] == during
        logits = model(*BATCH.inputs)
    assert [dict(vars(module)) for module in model.modules()] == before
    with torch.no_grad():
        assert torch.equal(logits, model(*BATCH.inputs))


def test_a_processor_that_is_never_called_is_an_error(subject):
    """A model whose forward does not come to its head: the processor's result cannot be what it returned."""
    model = build(Shape())
    with torch.no_grad(), patched(subject, model, "legacy"):
        kind = type(model)
        model.__class__ = type("Bypass", (kind,), {"forward": lambda self, *args, **kwargs: torch.zeros(2, 5)})
        with pytest.raises(Exception, match=r"without calling its output processor.*Next step:"):
            model(*BATCH.inputs, labels=BATCH.labels, output_processor=Processor())
        model.__class__ = kind


@pytest.mark.needs("config_logger")
def test_a_processor_and_the_config_logger(subject, tmp_path):
    """With a processor there are no logits to log; the hook comes before the logger too."""
    model = build(Shape())
    model.config.config_logger_dir = str(tmp_path)
    with torch.no_grad():
        _served(subject, model, labels=BATCH.labels)
    assert not list(tmp_path.glob("input_and_logits*"))
    assert model.config.config_logger_dir == str(tmp_path)
