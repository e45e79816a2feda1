"""The 1F1B schedule plan run whole on a model of experts: one micro-batch goes forward while another goes backward."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher

from mcore_compat.testing.reference import stock_forward
from support.models import DEVICE, Shape, build
from support.ranks.moe import TEMPERATURE, load_own_part, loss_of, own_batch, parts_of, upstream_gradients, whole_batch
from support.subjects import load_subject, patched

SEEDS = (11, 12)  # of the two micro-batches


@contextlib.contextmanager
def _split_sizes_on_the_host():
    """Sizes of the all-to-all as numbers: on a GPU the dispatcher copies them to the host, from a CPU it does not."""
    if DEVICE.type != "cpu":
        yield
        return
    stock = token_dispatcher.maybe_move_tensor_to_cpu

    def as_numbers(tensor, as_numpy=False, **_):
        return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_numbers
    try:
        yield
    finally:
        token_dispatcher.maybe_move_tensor_to_cpu = stock


def whole_plan_step(shape: Shape, ranks: int):
    """Stock forwards and backwards of both micro-batches on one rank, with the rows of all data-parallel ranks."""
    model = build(shape)
    state = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    outputs = []
    for seed in SEEDS:
        batch = whole_batch(shape.vocab, ranks, seed)
        output = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=TEMPERATURE)
        loss_of(output.log_probs, output.entropy, slice(None), ranks).backward()
        outputs.append(torch.stack((output.log_probs, output.entropy)).detach())
    return {
        "state": state,
        "outputs": outputs,
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def plan_steps(shape: Shape, modes: tuple, state: dict):
    """Both micro-batches through fused schedule plans, in each mode."""
    with _split_sizes_on_the_host():
        return {mode: _plan_step(shape, mode, state) for mode in modes}


def _plan_step(shape, mode, state):
    from megatron.core.pipeline_parallel.utils import set_streams

    from mcore_fused import build_fused_schedule_plan

    set_streams()
    # The plan frees the inputs of its nodes, which needs a dispatcher that copies: upstream allows no other.
    subject, model = load_subject(), build(shape, moe_token_dispatcher_type="alltoall")
    load_own_part(model, shape, state)
    with patched(subject, model, mode):
        plans, rows = [], None
        for seed in SEEDS:
            batch, rows = own_batch(shape.vocab, seed)
            plan = build_fused_schedule_plan(model, *batch.inputs, labels=batch.labels, temperature=TEMPERATURE)
            plans.append(plan)
        first, second = plans
        gradient = upstream_gradients(rows, parallel_state.get_data_parallel_world_size())
        run = type(first).run
        outputs = [run(first, None)]
        outputs.append(run(second, first, b_grad=gradient.to(outputs[0].dtype)))
        run(None, second, b_grad=gradient.to(outputs[0].dtype))
    return {
        "rows": rows,
        "outputs": [output.detach().cpu() for output in outputs],
        "parts": parts_of(model, shape, state),
        "evidence": dict(subject.evidence()),
    }
