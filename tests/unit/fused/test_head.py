"""The fused head without a model: what it asks of collectives and kernel, and what it refuses.

Numbers and gradients are proved in the cells; several ranks there are processes of their own.
"""

import types

import pytest
import torch
from torch import nn

from mcore_fused.errors import CallArgumentError, CallTypeError, UnsupportedConfigError
from mcore_fused.head import fused as head
from mcore_fused.head.fused import fused_head, fused_loss
from mcore_fused.outputs import FusedForwardOutput, FusedOutputProcessorContext

SEQ, BATCH, HIDDEN, ROWS = 3, 2, 4, 5


class Calls:
    """Stands in for collectives and kernel; keeps what they were given."""

    def __init__(self, monkeypatch, group):
        self.mapped, self.kernel = [], None
        monkeypatch.setattr(head, "tensor_parallel_group", lambda layer: layer.tp_group)
        for name in ("gather_sequence", "reduce_gradient"):
            monkeypatch.setattr(head, name, lambda hidden, group, name=name: self.mapping(name, hidden, group))
        monkeypatch.setattr(head, "linear_cross_entropy", self.cross_entropy)
        monkeypatch.setattr(head.dist, "get_world_size", lambda of: 2 if of is group else None)
        monkeypatch.setattr(head.dist, "get_rank", lambda of: 1 if of is group else None)

    def mapping(self, name, hidden, group):
        self.mapped.append((name, group))
        return torch.cat([hidden, hidden]) if name == "gather_sequence" else hidden

    def cross_entropy(self, hidden, weight, labels, **options):
        self.kernel = (hidden, weight, labels, options)
        rows = torch.arange(float(labels.numel())).reshape(labels.shape)
        return rows + 1, rows + 100


GROUP = object()


def layer_of(group=None, **attributes):
    layer = nn.Module()
    layer.tp_group = group
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def logits_of(layer, *, sequence_parallel=False, scale=1.0):
    hidden, weight = torch.ones(SEQ, BATCH, HIDDEN), torch.ones(ROWS, HIDDEN)
    return types.SimpleNamespace(
        layer=layer,
        hidden=hidden,
        sequence_parallel=sequence_parallel,
        scale=scale,
        call_with_layer_hooks=lambda compute: compute(hidden, weight),
    )


def labels_of(seq=SEQ):
    return torch.arange(BATCH * seq).reshape(BATCH, seq) % ROWS


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch, GROUP)


def test_one_rank_needs_no_collective_and_hands_all_settings_to_the_kernel(calls):
    context = FusedOutputProcessorContext(
        temperature=0.5, ignore_index=-1, vocab_size=4, logits_budget_bytes=64, backend="torch", counted_rows=5
    )
    labels = labels_of()
    layer = layer_of(gradient_accumulation_fusion=True)
    output = fused_head(logits_of(layer, scale=3.0), labels, context)
    hidden, weight, given, options = calls.kernel
    assert (hidden.shape, weight.shape, calls.mapped) == ((SEQ, BATCH, HIDDEN), (ROWS, HIDDEN), [])
    assert torch.equal(given, labels.T)
    assert options == {
        "temperature": 0.5,
        "tp_group": None,
        "ignore_index": -1,
        "scale": 3.0,
        "vocab_size": 4,
        "vocab_shard": None,
        "logits_budget_bytes": 64,
        "reduce_hidden_grad": False,
        "backend": "torch",
        "counted_rows": 5,
        "gradient_accumulation_fusion": True,
    }
    assert isinstance(output, FusedForwardOutput)
    assert output.log_probs.tolist() == [[1, 3, 5], [2, 4, 6]]
    assert output.entropy.tolist() == [[100, 102, 104], [101, 103, 105]]
    assert output.hidden_states is None


def test_hidden_states_and_one_tensor_are_returned_when_asked_for(calls):
    logits = logits_of(layer_of())
    kept = fused_head(logits, labels_of(), FusedOutputProcessorContext(return_hidden_states=True))
    assert kept.hidden_states is logits.hidden
    single = fused_head(logits, labels_of(), FusedOutputProcessorContext(single_tensor=True))
    assert torch.equal(single, torch.stack((kept.log_probs, kept.entropy)))


def test_the_gradient_of_a_split_head_is_summed_over_its_own_group(calls):
    """U6, Megatron-LM#7452: a model built with groups of its own must not be reduced over the global one."""
    fused_head(logits_of(layer_of(GROUP)), labels_of(), FusedOutputProcessorContext())
    assert calls.mapped == [("reduce_gradient", GROUP)]
    assert calls.kernel[3]["tp_group"] is GROUP


def test_a_layer_that_wants_the_partial_gradient_keeps_it(calls):
    layer = layer_of(GROUP, disable_grad_reduce=True)
    fused_head(logits_of(layer), labels_of(), FusedOutputProcessorContext())
    assert calls.mapped == []


def test_a_shard_of_the_sequence_is_gathered_and_meets_the_whole_labels(calls):
    logits = logits_of(layer_of(GROUP), sequence_parallel=True)
    fused_head(logits, labels_of(2 * SEQ), FusedOutputProcessorContext())
    assert calls.mapped == [("gather_sequence", GROUP)]
    assert calls.kernel[0].shape == (2 * SEQ, BATCH, HIDDEN)


def test_without_a_group_the_flag_of_the_sequence_means_nothing(calls):
    fused_head(logits_of(layer_of(), sequence_parallel=True), labels_of(), FusedOutputProcessorContext())
    assert calls.mapped == []


@pytest.mark.parametrize(
    ("output_size", "shard"), [(2 * ROWS, (ROWS, 2 * ROWS)), (2 * ROWS + 1, None), (ROWS, None), (None, None)]
)
def test_an_even_split_says_where_its_shard_lies_and_another_asks(calls, output_size, shard):
    layer = layer_of(GROUP) if output_size is None else layer_of(GROUP, output_size=output_size)
    fused_head(logits_of(layer), labels_of(), FusedOutputProcessorContext())
    assert calls.kernel[3]["vocab_shard"] == shard


def test_other_labels_are_a_loss_at_temperature_one(calls):
    loss = fused_loss(logits_of(layer_of()), labels_of(), FusedOutputProcessorContext(temperature=0.5))
    assert calls.kernel[3]["temperature"] == 1.0
    assert loss.tolist() == [[-1, -3, -5], [-2, -4, -6]]


def test_a_temperature_for_each_token_is_turned_as_the_labels_are(calls):
    temperature = torch.rand(BATCH, SEQ) + 0.5
    fused_head(logits_of(layer_of()), labels_of(), FusedOutputProcessorContext(temperature=temperature))
    assert torch.equal(calls.kernel[3]["temperature"], temperature.T)
    with pytest.raises(CallArgumentError, match=r"^temperature has shape \(3, 2\), the labels \(2, 3\)\.") as refusal:
        fused_head(logits_of(layer_of()), labels_of(), FusedOutputProcessorContext(temperature=temperature.T))
    assert refusal.value.next_step == "pack, pad and shard a per-token temperature exactly as the labels."


@pytest.mark.parametrize(
    ("labels", "error", "problem", "step"),
    [
        (labels_of().float(), CallTypeError, "labels are torch.float32.", "pass an integer tensor"),
        ([[1, 2, 3]] * 2, CallTypeError, "labels are list.", "[batch, seq] of vocabulary indices"),
        (labels_of().bool(), CallTypeError, "labels are torch.bool.", "integer"),
        (labels_of().T, CallArgumentError, "labels have shape (3, 2), the hidden states have rows for", "slice"),
        (labels_of()[0], CallArgumentError, "[batch, seq] = (2, 3).", "(context parallelism, VLM token merging)"),
        (labels_of().to("meta"), CallArgumentError, "labels are on meta, the hidden states on cpu.", "move the labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_name(calls, labels, error, problem, step):
    with pytest.raises(error) as refusal:
        fused_head(logits_of(layer_of()), labels, FusedOutputProcessorContext())
    assert type(refusal.value) is error
    assert problem in refusal.value.problem
    assert step in refusal.value.next_step
    assert calls.kernel is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_labels_of_any_integer_type_are_taken(calls, dtype):
    fused_head(logits_of(layer_of()), labels_of().to(dtype), FusedOutputProcessorContext())
    assert calls.kernel[2].dtype is dtype


def test_megatron_fsdp_is_served_with_one_tensor_only(calls, monkeypatch):
    seen = []
    monkeypatch.setattr(head, "is_megatron_fsdp_weight", lambda weight: seen.append(weight.shape) or True)
    with pytest.raises(UnsupportedConfigError, match=r"^Megatron-FSDP looks for tensors") as refusal:
        fused_head(logits_of(layer_of()), labels_of(), FusedOutputProcessorContext())
    assert "call_fused_forward" in refusal.value.next_step
    assert calls.kernel is None
    assert fused_head(logits_of(layer_of()), labels_of(), FusedOutputProcessorContext(single_tensor=True)).shape == (
        2, BATCH, SEQ,
    )  # fmt: skip
    assert seen == [(ROWS, HIDDEN)] * 2


def test_each_run_of_the_kernel_is_counted_once_on_its_layer(calls, monkeypatch):
    counted = []
    monkeypatch.setattr(head.evidence, "record", lambda layer, **counts: counted.append((layer, counts)))
    layer = layer_of()
    fused_head(logits_of(layer), labels_of(), FusedOutputProcessorContext())
    fused_loss(logits_of(layer), labels_of(), FusedOutputProcessorContext())
    assert counted == [(layer, {"kernel_launches": 1})] * 2
