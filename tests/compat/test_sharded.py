"""Parameters sharded over data-parallel ranks: the head's weight exists only inside a call of its FSDP unit.

Two ranks with a batch each, against the whole model on both batches and against the unfused sharded model.
"""

from functools import lru_cache

import pytest
import torch
from support.models import Shape
from support.models.release import release_mode
from support.ranks.megatron_fsdp import accumulating_fsdp_job, megatron_fsdp_job, refused_calls_job
from support.ranks.sharded import Layout
from support.ranks.sharded_jobs import failing_job, refused_job, step_and_training_job, step_job

from mcore_compat.testing.ranks import run_ranks

pytestmark = pytest.mark.needs("call", "patch", "mode", "legacy", "refusal", "float64", "sharded")

PLAIN, TIED = Shape(vocab=96), Shape(vocab=96, tied=True)
LAYOUTS = {
    "head is a unit": (PLAIN, Layout()),  # Megatron's wrapper around Transformer Engine's layers
    "head in the root": (PLAIN, Layout(head="root")),  # Megatron's wrapper around local layers (0.14)
    "head and norm": (PLAIN, Layout(wrapper=False, head="pair")),
    "recompute": (Shape(vocab=96, recompute=True), Layout()),
    "tied, in the root": (TIED, Layout(head="root", embedding=False)),
    "tied, kept": (TIED, Layout(wrapper=False, head="root", reshard=False)),
}
# float64 sums in another order: some hundred roundings of 1.1e-16, relative to the size of the whole gradient.
CLOSE = 1e-11
# bf16: each of some roundings of 4e-3 of the whole.
HALF = 4e-2


@lru_cache(maxsize=8)
def _ranks(layout):
    return run_ranks(step_and_training_job, *LAYOUTS[layout], world=2)


def _assert_close(actual, expected, what, tolerance=CLOSE):
    error = (actual.double() - expected.double()).norm().item()
    assert error <= tolerance * max(1.0, expected.double().norm().item()), f"{what} differs by {error:.3g}"


def _assert_same_step(actual, expected, what, tolerance=CLOSE):
    for name in ("log_probs", "entropy", "hidden"):
        _assert_close(actual[name], expected[name], f"{name} of {what}", tolerance)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        _assert_close(actual["gradients"][name], gradient, f"gradient of {name} of {what}", tolerance)


def _assert_bit_equal(first, second):
    for name in ("log_probs", "entropy", "hidden"):
        assert torch.equal(first[name], second[name]), name
    for name, gradient in first["gradients"].items():
        assert torch.equal(gradient, second["gradients"][name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step(subject, layout):
    """Outputs, hidden gradient and every reduced weight gradient; the weight is a shard again, and nothing is kept."""
    for rank, result in enumerate(_ranks(layout)):
        found = result["step"]
        for mode in ("stock", "auto", "legacy"):
            step = found[mode]
            _assert_same_step(step, found["whole"], f"{mode} on rank {rank}")
            assert step["shard"] == found["stock"]["shard"]
            assert step["shard"][0]
            assert step["shard"][2]
            assert step["gathered_bytes"] == 0
        _assert_bit_equal(found["auto"], found["legacy"])
        assert found["auto"]["mode"] == release_mode(subject)
        assert found["kernel_launches"] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps(layout):
    """Training follows the unfused sharded model and the whole one, and is the same in both modes."""
    for rank, result in enumerate(_ranks(layout)):
        found = result["training"]
        assert found["auto"]["curve"] == found["legacy"]["curve"]
        for mode in ("stock", "auto", "legacy"):
            assert found[mode]["curve"] == pytest.approx(found["whole"]["curve"], rel=CLOSE), f"{mode} on rank {rank}"
        for name, expected in found["stock"]["parameters"].items():
            _assert_close(found["auto"]["parameters"][name], expected, name)
            assert torch.equal(found["auto"]["parameters"][name], found["legacy"]["parameters"][name]), name


@pytest.mark.needs("mtp")
@pytest.mark.since("mtp")
def test_one_step_with_mtp():
    """The head is called for each depth. MTP's loss is fp32 in stock: gradients that contain it agree to some 1e-6."""
    for rank, found in enumerate(run_ranks(step_job, Shape(vocab=96, mtp=1), Layout(), world=2)):
        for mode in ("auto", "legacy"):
            _assert_same_step(found[mode], found["whole"], f"{mode} on rank {rank}", 2e-6)


@pytest.mark.needs("tensor_parallel")
def test_one_step_with_tensor_parallelism():
    """Four ranks: a vocabulary shard each, of which FSDP holds a half."""
    shape = Shape(vocab=96, tp=2)
    for rank, found in enumerate(run_ranks(step_job, shape, Layout(), world=4, tp=2)):
        for mode in ("auto", "legacy"):
            _assert_same_step(found[mode], found["whole"], f"{mode} on rank {rank}")
        _assert_bit_equal(found["auto"], found["legacy"])


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (Shape(vocab=96, dtype=torch.bfloat16), Layout(head="root")),
        (Shape(vocab=96, dtype=torch.float32), Layout(wrapper=False, cast=True)),
    ],
    ids=["Float16Module is the root", "units cast to bf16"],
)
def test_one_step_in_bf16(shape, layout):
    """Against the unfused model in the same units: both round every layer to bf16. Outputs stay fp32."""
    for rank, found in enumerate(run_ranks(step_job, shape, layout, world=2)):
        for mode in ("auto", "legacy"):
            assert found[mode]["log_probs"].dtype is found[mode]["entropy"].dtype is torch.float32
            _assert_same_step(found[mode], found["stock"], f"{mode} on rank {rank}", HALF)
        _assert_bit_equal(found["auto"], found["legacy"])


@pytest.mark.parametrize("layout", ["head is a unit", "head in the root"])
def test_a_call_that_fails_leaves_the_model_usable(layout):
    """The head's unit frees what it had gathered, and the next step is that of a fresh model."""
    for result in run_ranks(failing_job, *LAYOUTS[layout], world=2):
        for found in result.values():
            assert "CallArgumentError: labels have shape (2, 7)" in found["error"]
            assert found["shard"] is (layout == "head is a unit")  # a root that failed keeps its weights, as in stock
            assert torch.equal(found["again"]["log_probs"], found["fresh"]["log_probs"])
            for name, gradient in found["fresh"]["gradients"].items():
                assert torch.equal(found["again"]["gradients"][name], gradient), name


def test_a_tied_weight_that_its_unit_has_freed_is_refused():
    """The embedding's unit frees the shared weight before the head runs; stock fails there too, less clearly."""
    for found in run_ranks(refused_job, TIED, Layout(wrapper=False, head="root"), world=2):
        for stage, error in found.values():
            assert stage == "call"
            assert "UnsupportedOutputLayerError" in error
            assert "reshard_after_forward=False" in error


def test_a_shard_whose_unit_is_not_seen_is_refused():
    """From the inner model nobody can tell an FSDP unit around it from a weight that is sharded in some other way."""
    shape, layout = Shape(vocab=96, dtype=torch.bfloat16), Layout(wrapper=False, head="root", embedding=False)
    for found in run_ranks(refused_job, shape, layout, ("chain", "inner"), world=2):
        for mode in ("auto", "legacy"):
            assert found["chain", mode] == ("none", "")
            stage, error = found["inner", mode]
            assert stage == "patch"
            assert "outermost module" in error


@pytest.mark.since("megatron_fsdp")
@pytest.mark.parametrize(("strategy", "tied"), [("optim_grads", False), ("optim_grads_params", True)])
def test_five_steps_under_megatron_fsdp(tied, strategy):
    """Its root starts the reduction of gradients from the tensors that the model returns; fp32, some 1e-6 a step."""
    shape = Shape(vocab=96, tied=tied, dtype=torch.float32)
    for rank, found in enumerate(run_ranks(megatron_fsdp_job, shape, strategy, world=2)):
        assert found["auto"]["curve"] == found["legacy"]["curve"]
        for mode in ("stock", "auto"):
            assert found[mode]["curve"] == pytest.approx(found["whole"]["curve"], rel=1e-5), f"{mode} on rank {rank}"


@pytest.mark.since("megatron_fsdp_accumulation")
@pytest.mark.needs("main_grad")
@pytest.mark.parametrize(
    ("strategy", "tied"), [("optim_grads", False), ("optim_grads_params", False), ("optim_grads_params", True)]
)
def test_five_steps_under_megatron_fsdp_with_accumulation(tied, strategy):
    """``gradient_accumulation_fusion``: the head asks the wrapper for its buffer, as Megatron's own layers do.

    With tied weights stock under this wrapper loses a part of the embedding's gradient, and is the reference as it is.
    Torch's FSDP2 does not go with it in Megatron: ``training/arguments.py`` asserts so for ``--use-torch-fsdp2``.
    """
    shape = Shape(vocab=96, tied=tied, dtype=torch.float32)
    for rank, found in enumerate(run_ranks(accumulating_fsdp_job, shape, strategy, world=2)):
        assert found["auto"]["curve"] == found["legacy"]["curve"]
        assert found["auto"]["curve"] == pytest.approx(found["stock"]["curve"], rel=1e-5), f"rank {rank}"
        if not tied:
            assert found["auto"]["curve"] == pytest.approx(found["whole"]["curve"], rel=1e-5), f"rank {rank}"


@pytest.mark.since("megatron_fsdp")
def test_outputs_that_megatron_fsdp_cannot_see_are_refused():
    shape = Shape(vocab=96, dtype=torch.float32)
    for found in run_ranks(refused_calls_job, shape, "optim_grads_params", world=2):
        for direct, hidden in found.values():
            assert "UnsupportedConfigError" in direct
            assert "call_fused_forward" in direct
            assert "UnsupportedConfigError" in hidden
            assert "return_hidden_states" in hidden
