"""What a rank does for the rows of the grid: each row is a layout and features, run stock and fused in both modes.

The reference is the same model in the same layout with its own logits. Positions and attention are local to a rank
where context parallelism splits the sequence: both sides compute the same, and what is judged comes after them.
"""

import copy
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_compat.testing import process_groups
from mcore_compat.testing.models import PackedAttention
from mcore_compat.testing.reference import gradients, stock_forward
from support.models import DEVICE, HAS_MTP, Shape, batch_for, build
from support.subjects import load_subject, patched

WORLD = 4
VOCAB, ROWS, SEQ = 96, 2, 8
TEMPERATURE = 0.7
_PATIENCE = timedelta(seconds=30)
_SPLIT = 5  # a packed batch has rows of 5 and of the rest


@dataclass(frozen=True)
class Row:
    """One row of the grid.

    Attributes:
        tied: embedding and head share their weight.
        tensor: "1", "2", or "2 + sequence" for sequence parallelism.
        pipeline: stages.
        context: context-parallel ranks.
        experts: "none", "one rank", or "two ranks" for expert parallelism.
        mtp: depths of multi-token prediction.
        mup: MuP's output multiplier.
        packed: two rows packed into one.
        training: ``model.train()`` in place of ``model.eval()``.
        recompute: layers are recomputed in the backward.
    """

    tied: bool
    tensor: str
    pipeline: int
    context: int
    experts: str
    mtp: int
    mup: bool
    packed: bool
    training: bool
    recompute: bool

    @property
    def tp(self):
        return 1 if self.tensor == "1" else 2

    @property
    def layout(self):
        return {
            "tp": self.tp,
            "pp": self.pipeline,
            "cp": self.context,
            "ep": 2 if self.experts == "two ranks" else 1,
        }

    @property
    def shape(self):
        return Shape(
            tied=self.tied,
            vocab=VOCAB,
            mtp=self.mtp,
            mup=self.mup,
            packed=self.packed,
            experts=0 if self.experts == "none" else 4,
            sequence_parallel=self.tensor == "2 + sequence",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            recompute=self.recompute,
            positions="rope" if self.context == 1 else "learned_absolute",
            **self.layout,
        )


class LocalAttention(PackedAttention):
    """Attention inside a rank's own tokens; the local one refuses context parallelism in its constructor."""

    def __init__(self, config, *args, **kwargs):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)


def run_rows(rows):
    """For each row: ``{mode: {what: relative difference}}`` of this rank, or the traceback of what went wrong."""
    return [_guarded(row) for row in rows]


def _guarded(row):
    try:
        found = _run(row)
    except Exception:  # noqa: BLE001 - told as the row's result; the other rows go on
        found = traceback.format_exc()
    try:
        torch.distributed.monitored_barrier(timeout=_PATIENCE)
    except RuntimeError as error:  # the others wait inside this row, so no later row can start
        raise RuntimeError(f"{row}: {found if isinstance(found, str) else error}") from None
    return found


def _run(row):
    process_groups.lay_out(**row.layout)
    subject = load_subject()
    model = build(row.shape, attention=LocalAttention if row.packed or row.context > 1 else None)
    model.train(row.training)
    batch = _batch(row)
    modes = ["auto", "legacy"] if "legacy" in subject.capabilities else ["auto"]
    stock, found = _step(row, model, batch, None, "stock"), {}
    for mode in modes:
        before = subject.evidence()["kernel_launches"]
        fused = _step(row, model, batch, subject, mode)
        with torch.no_grad():
            quiet = _forward(row, model, batch, subject, mode)
        launched = subject.evidence()["kernel_launches"] - before
        found[mode] = _differences(fused, stock) | {"launches": launched}
        if quiet is not None:
            found[mode] |= {
                f"{name} without gradient": _relative(getattr(quiet, name), stock[name])
                for name in ("log_probs", "entropy")
            }
    return found


def _batch(row):
    """The rank's own tokens; those of its tensor- and pipeline-parallel peers are the same."""
    seed = 10 * parallel_state.get_data_parallel_rank() + parallel_state.get_context_parallel_rank()
    batch = batch_for(VOCAB, 1 if row.packed else ROWS, SEQ, seed)
    kwargs = {}
    if row.mtp:
        kwargs["loss_mask"] = torch.ones_like(batch.labels, dtype=torch.float32)
    if row.packed:
        width = SEQ * row.context
        rows = torch.tensor([0, _SPLIT * row.context, width], dtype=torch.int32, device=DEVICE)
        kwargs["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=rows, cu_seqlens_kv=rows, max_seqlen_q=width, max_seqlen_kv=width
        )
    return batch, kwargs


def _step(row, model, batch, subject, mode):
    """One forward and backward through all stages; this rank's outputs and gradients."""
    _forget_mtp_losses()
    last, received = parallel_state.is_pipeline_last_stage(), _receive(row, model)
    output = _call(model, batch, subject, mode)
    found = {}
    if last:
        weights = torch.randn(
            2, *batch[0].labels.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64
        )
        weights = weights.to(DEVICE)
        (weights[0] * output.log_probs - 0.3 * weights[1] * output.entropy).sum().backward()
        found = {"log_probs": output.log_probs.detach(), "entropy": output.entropy.detach()}
    else:
        peer = parallel_state.get_pipeline_model_parallel_next_rank()
        torch.distributed.send(output.detach().contiguous(), peer)
        gradient = torch.empty_like(output)
        torch.distributed.recv(gradient, peer)
        output.backward(gradient)
    if received is not None:
        torch.distributed.send(received.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
    return found | gradients(model)


def _forward(row, model, batch, subject, mode):
    """One forward through all stages; the last one's outputs."""
    _receive(row, model)
    output = _call(model, batch, subject, mode)
    if parallel_state.is_pipeline_last_stage():
        return output
    torch.distributed.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def _receive(row, model):
    """The hidden states of the stage before, handed to the model."""
    if parallel_state.is_pipeline_first_stage():
        return None
    length = SEQ // row.tp if row.tensor == "2 + sequence" else SEQ
    hidden = torch.empty(length, 1 if row.packed else ROWS, 32, dtype=torch.float64, device=DEVICE)
    torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
    model.set_input_tensor(hidden.requires_grad_(torch.is_grad_enabled()))
    return hidden


def _call(model, batch, subject, mode):
    batch, kwargs = batch
    inputs = (batch.ids, batch.positions, None if "packed_seq_params" in kwargs else batch.mask)
    if mode != "stock":
        with patched(subject, model, mode):
            return subject.call(model, *inputs, labels=batch.labels, temperature=TEMPERATURE, **kwargs)
    if not parallel_state.is_pipeline_last_stage():
        return model(*inputs, labels=batch.labels, **kwargs)
    return stock_forward(model, *inputs, labels=batch.labels, temperature=TEMPERATURE, **kwargs)


def _differences(actual, expected):
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return {name: _relative(actual[name], value) for name, value in expected.items()}


def _relative(actual, expected):
    return ((actual - expected).norm() / max(1.0, expected.norm().item())).item()


def _forget_mtp_losses():
    """Upstream logs MTP losses into a class-wide tensor that the first model sizes."""
    if HAS_MTP:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker.clear()
