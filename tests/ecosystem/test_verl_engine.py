"""verl's engine calls this project's library in place of its own module, unchanged.

The real ``MegatronEngineWithLMHead`` patches the model and runs ``forward_step`` and ``postprocess_micro_batch_func``
on a real micro-batch (a TensorDict of jagged tensors), with verl's own module and with the library swapped in.
The engine's fused path is packed only: its padded formats (``data_format="bshd"``) are unfused in verl, too.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.models import Shape, build, half_chain
from support.models.packed import Rows, rows_alone
from support.models.release import features
from tensordict import TensorDict
from verl_engine import SWAPPED, engine_module
from verl_torch import torch_kernel

import mcore_fused
from mcore_compat.testing.reference import assert_same_gradients, gradients
from mcore_fused.evidence import process_evidence

# The outputs are fp32 with values up to some tens; the model is float64.
CLOSE = 1e-5
LENGTHS, TEMPERATURE = (5, 1, 9, 3), 0.7
ROWS = Rows.of(97, LENGTHS)


def _engine(module, chunks, architecture="Qwen3ForCausalLM"):
    """The engine as ``initialize`` leaves it, as far as a step reads it."""
    engine = object.__new__(module.MegatronEngineWithLMHead)
    engine.module = chunks
    engine.is_value_model = False
    engine.enable_routing_replay = False
    engine.tf_config = chunks[0].config
    engine.engine_config = SimpleNamespace(
        use_fused_kernels=True, use_remove_padding=True, pad_to_length=False, dynamic_context_parallel=False
    )
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        tokenizer=SimpleNamespace(pad_token_id=0),
        mtp=SimpleNamespace(enable=False),
    )
    engine._maybe_enable_fused_kernels()
    return engine


def _batch(**settings):
    jagged = {"input_ids": ROWS.nested, "loss_mask": torch.nested.nested_tensor_from_jagged(
        torch.ones(sum(LENGTHS), dtype=torch.bool), ROWS.nested.offsets()
    )}  # fmt: skip
    batch = TensorDict(jagged | {"temperature": torch.full((len(LENGTHS),), TEMPERATURE)}, batch_size=len(LENGTHS))
    for name, value in settings.items():
        batch.set_non_tensor(name, value)
    return batch


def _step(module, model, **kwargs):
    """A training step's forward and backward as the engine's pipeline schedule runs it: (outputs, gradients)."""
    engine = _engine(module, [model], **kwargs)
    seen = {}

    def loss_function(model_output, data, dp_group):
        seen.update(model_output)
        labelled = _labelled()
        log_probs, entropy = (model_output[name].values()[labelled] for name in ("log_probs", "entropy"))
        return log_probs.sum() - 0.3 * entropy.sum(), {}

    def postprocess(output, data, local_cp_size=None):
        return engine.postprocess_micro_batch_func(
            output, data, forward_only=False, loss_function=loss_function, local_cp_size=local_cp_size
        )

    batch = _batch(calculate_entropy=True, num_micro_batch=1)
    output, function = engine.forward_step(iter([batch]), model, None, postprocess)
    loss, _ = function(output)[:2]
    loss.backward()
    return {name: seen[name].values().detach() for name in ("log_probs", "entropy")}, gradients(model)


def _labelled():
    """Slots with a next token; verl gives the last slot of a row the first label, and its callers mask it."""
    return torch.cat([torch.arange(length) < length - 1 for length in LENGTHS])


@pytest.fixture
def torch_in_place_of_verls_kernel(monkeypatch):
    with engine_module(swapped=False):
        monkeypatch.setattr(sys.modules[SWAPPED], "linear_cross_entropy", torch_kernel)


@pytest.mark.usefixtures("torch_in_place_of_verls_kernel")
@pytest.mark.parametrize("tied", [False, True])
def test_a_training_step(tied):
    """Outputs and all gradients: the engine with the library, with verl's module, and the rows by themselves."""
    shape = Shape(packed=True, tied=tied)
    alone = rows_alone(build(shape), ROWS, [TEMPERATURE] * len(LENGTHS))
    expected = {
        name: torch.cat([pair[at] for pair in alone]).detach() for at, name in enumerate(("log_probs", "entropy"))
    }
    with engine_module(swapped=False) as module:
        theirs, their_gradients = _step(module, build(shape))
    before = process_evidence()
    with engine_module(swapped=True) as module:
        ours, our_gradients = _step(module, build(shape))
    after = process_evidence()
    counter = "hook_calls" if "hook" in features() else "deferred_head_calls"
    assert getattr(after, counter) - getattr(before, counter) == 1
    for name, value in expected.items():
        for found in (ours, theirs):
            assert (found[name] - value)[_labelled()].abs().max() <= CLOSE, name
    assert_same_gradients(our_gradients, their_gradients, 1e-6)


@pytest.mark.parametrize("architecture", ["NobodyRegisteredThisForCausalLM", "DeepseekV3ForCausalLM"])
def test_any_architecture_is_judged_by_its_model(architecture):
    """As in verl's registry: a name that nobody registered gets the language forward."""
    with engine_module(swapped=True) as module:
        ours, _ = _step(module, build(Shape(packed=True)), architecture=architecture)
        known, _ = _step(module, build(Shape(packed=True)))
    assert torch.equal(ours["log_probs"], known["log_probs"])


def test_the_wrapped_model_of_bf16_training():
    """``DDP(Float16Module(GPTModel))``, as the engine holds it."""
    with engine_module(swapped=True) as module:
        chain = half_chain(build(Shape(packed=True, dtype=torch.bfloat16)))
        engine = _engine(module, [chain])
        output, _ = engine.forward_step(iter([_batch(calculate_entropy=False)]), chain, None, print)
    assert set(output) == {"log_probs"}
    assert torch.equal(output["log_probs"].offsets(), ROWS.nested.offsets())
    assert output["log_probs"].values().dtype == torch.float32


def test_every_name_of_verls_module_that_others_import_is_there():
    """What verl's registry and engine take from the module."""
    for name in (
        "patch_fused_forward",
        "unpatch_fused_forward",
        "fused_forward_model_gen",
        "fused_forward_model_engine",
    ):
        assert callable(getattr(mcore_fused, name))
