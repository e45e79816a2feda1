"""What the ranks do, by name. Every job runs on all ranks, in one order, and returns tensors that can be saved.

In fp32 and bf16 the fused head is the Triton kernel (float64 has none), so these are the shapes of the GPU lane.
"""

import contextlib
import itertools
from dataclasses import replace

import torch
from lane.chain import LANE, bf16_chain
from lane.packed import packed_batch
from lane.training import advantages_for, train
from megatron.core import parallel_state
from support.models import DEVICE, HAS_MTP, Shape, build
from support.models.context_parallel import ContextParallelAttention
from support.models.packed import Rows
from support.models.partition_mode import partition_mode_known
from support.models.release import features
from support.ranks.megatron_fsdp import megatron_fsdp_job
from support.ranks.moe import EXPERTS, moe_steps, whole_moe_step
from support.ranks.moe_plan import plan_steps, whole_plan_step
from support.ranks.parallel import pipeline_step, tensor_parallel_step, whole_model_step
from support.ranks.sharded import Layout
from support.ranks.sharded_jobs import step_and_training_job, step_job
from support.subjects import load_subject, patched

MODES = ("auto", "legacy")
BASE = Shape(vocab=96, dtype=torch.float32)
CP_LENGTHS = (13, 1, 24, 0, 7)
SHARDS = (70, 27)
# Megatron's wrapper of FSDP2: what it makes of Transformer Engine's layers, of local ones, and with tied weights.
SHARDED = {
    "unit": (BASE, Layout()),
    "root": (BASE, Layout(head="root")),
    "tied": (replace(BASE, tied=True), Layout(head="root", embedding=False)),
}
# Layouts of a model of experts: sizes, and data-parallel ranks. Pipeline stages with experts over ranks need four GPUs.
EXPERT_LAYOUTS = {"ep2": ({"ep": 2}, 2), "tp2-ep2": ({"tp": 2, "ep": 2}, 1)}
# Filled by jobs of one rank's parallelism, read by the pipelined ones that must start from the same parameters.
_states = {}


def _whole(tied, mtp):
    result = whole_model_step(replace(BASE, tied=tied, mtp=mtp), "stock")
    _states[tied, mtp] = result["state"]
    return result


def _pipeline(tied, mtp, mode):
    return pipeline_step(replace(BASE, tied=tied, mtp=mtp, pp=2), mode, _states[tied, mtp])


def _experts(tied, **sizes):
    return replace(BASE, tied=tied, experts=EXPERTS, sequence_parallel=sizes.get("tp", 1) > 1, **sizes)


def _whole_experts(step, tied, data_ranks):
    result = step(_experts(tied), data_ranks)
    _states[step, tied, data_ranks] = result["state"]
    return result


def _experts_over_ranks(name, tied):
    sizes, data_ranks = EXPERT_LAYOUTS[name]
    return moe_steps(_experts(tied, **sizes), MODES, _states[whole_moe_step, tied, data_ranks])


def _plan_over_ranks(tied):
    return plan_steps(_experts(tied, ep=2), MODES, _states[whole_plan_step, tied, 2])


def _context(cp, mode, tied, cp_layout):
    """The framework's jagged forward on a packed batch that is split over the context-parallel ranks.

    Positions are learned, so that they travel with the packed batch in either layout. A release whose PackedSeqParams
    cannot say that the layout is contiguous is given a modelled one that can.
    """
    from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

    rows = Rows.of(BASE.vocab, CP_LENGTHS, 8)
    shape = replace(BASE, tied=tied, cp=cp, packed=True, positions="learned_absolute")
    model = build(shape, attention=ContextParallelAttention)
    temperatures = torch.tensor([0.5, 2.0, 0.9, 1.0, 0.7], device=DEVICE)
    forward = fused_forward_no_padding_gen(mode=mode)
    with partition_mode_known() if cp_layout == "contiguous" else contextlib.nullcontext():
        output = forward(model, rows.nested, rows.nested, {}, temperatures, True, 0, cp_layout=cp_layout)
    weights = torch.linspace(-1, 2, 2 * sum(CP_LENGTHS), device=DEVICE).reshape(2, -1)
    (weights[0] * output["log_probs"].values() + weights[1] * output["entropy"].values()).sum().backward()
    return {
        "log_probs": output["log_probs"].values().detach(),
        "entropy": output["entropy"].values().detach(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }


def _kernel(dtype):
    """Unequal vocabulary shards, some labels ignored, a temperature a token; all gradients."""
    import mcore_fused

    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(53, 72, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(sum(SHARDS), 72, generator=generator).to(DEVICE, dtype)
    labels = torch.randint(0, sum(SHARDS), (53,), generator=generator).to(DEVICE)
    labels[5:8] = -100
    temperature = (torch.rand(53, generator=generator) + 0.5).to(DEVICE)
    upstream = torch.randn(2, 53, generator=generator).to(DEVICE)
    group = parallel_state.get_tensor_model_parallel_group()
    first = sum(SHARDS[: group.rank()])
    shard = weight[first : first + SHARDS[group.rank()]].clone().requires_grad_()
    outputs = mcore_fused.linear_cross_entropy(hidden, shard, labels, temperature, tp_group=group)
    sum((gradient * output).sum() for gradient, output in zip(upstream, outputs, strict=True)).backward()
    return {
        "inputs": (hidden.detach(), weight, labels, temperature, upstream),
        "log_probs": outputs[0].detach(),
        "entropy": outputs[1].detach(),
        "hidden_gradient": hidden.grad,
        "weight_gradient": shard.grad,
    }


def _training(tp, tied, mode):
    """Five policy-gradient steps of the bf16 chain on packed rows."""
    shape = replace(LANE, vocab=1024, packed=True, tied=tied, tp=tp)
    chain, batch, subject = bf16_chain(shape), packed_batch(shape.vocab, seed=6), load_subject()
    inputs = {"labels": batch.labels, "temperature": 0.8, "packed_seq_params": batch.params}
    with patched(subject, chain, mode):
        losses = train(chain, batch, lambda: subject.call(chain, *batch.inputs, **inputs), advantages_for(batch.labels))
    return {"losses": torch.tensor(losses, dtype=torch.float64)}


def jobs():
    """Name to (parallel layout, function, arguments), in the order in which they run."""
    flags, mtps = (False, True), (0, 1) if HAS_MTP else (0,)
    one = {"tp": 1, "pp": 1, "cp": 1}
    listed = {}
    for tied in flags:
        listed[f"tp1-{tied}"] = (one, tensor_parallel_step, (replace(BASE, tied=tied), "stock"))
        listed[f"tp1-bf16-{tied}"] = (
            one, tensor_parallel_step, (replace(BASE, tied=tied, dtype=torch.bfloat16), "stock"),
        )  # fmt: skip
        for mode in MODES:
            listed[f"train1-{tied}-{mode}"] = (one, _training, (1, tied, mode))
        listed |= {f"pp1-{tied}-{mtp}": (one, _whole, (tied, mtp)) for mtp in mtps}
        listed[f"cp1-{tied}"] = (one, _context, (1, "auto", tied, "zigzag"))
    tensor = one | {"tp": 2}
    for tied, mode in itertools.product(flags, MODES):
        for sequence in flags:
            shape = replace(BASE, tied=tied, tp=2, sequence_parallel=sequence)
            listed[f"tp2-{tied}-{sequence}-{mode}"] = (tensor, tensor_parallel_step, (shape, mode))
            half = replace(shape, dtype=torch.bfloat16)
            listed[f"tp2-bf16-{tied}-{sequence}-{mode}"] = (tensor, tensor_parallel_step, (half, mode))
        listed[f"train2-{tied}-{mode}"] = (tensor, _training, (2, tied, mode))
    listed |= {f"kernel-{str(kind)[6:]}": (tensor, _kernel, (kind,)) for kind in (torch.float32, torch.bfloat16)}
    for tied, mode, mtp in itertools.product(flags, MODES, mtps):
        listed[f"pp2-{tied}-{mtp}-{mode}"] = (one | {"pp": 2}, _pipeline, (tied, mtp, mode))
    for tied, mode, layout in itertools.product(flags, MODES, ("zigzag", "contiguous")):
        listed[f"cp2-{tied}-{layout}-{mode}"] = (one | {"cp": 2}, _context, (2, mode, tied, layout))
    for name, (shape, units) in SHARDED.items():
        listed[f"fsdp2-{name}"] = (one, step_and_training_job, (shape, units))
    listed["fsdp2-bf16"] = (one, step_job, (replace(BASE, dtype=torch.bfloat16), Layout(head="root")))
    if "megatron_fsdp" in features():
        for tied in flags:
            listed[f"megatron-fsdp-{tied}"] = (one, megatron_fsdp_job, (replace(BASE, tied=tied), "optim_grads_params"))
    for tied, (name, (sizes, data_ranks)) in itertools.product(flags, EXPERT_LAYOUTS.items()):
        listed[f"experts1-{tied}-{data_ranks}"] = (one, _whole_experts, (whole_moe_step, tied, data_ranks))
        listed[f"experts-{name}-{tied}"] = (one | sizes, _experts_over_ranks, (name, tied))
    if "schedule_plan" in features():
        for tied in flags:
            listed[f"plan1-{tied}"] = (one, _whole_experts, (whole_plan_step, tied, 2))
            listed[f"plan-ep2-{tied}"] = (one | {"ep": 2}, _plan_over_ranks, (tied,))
    return listed
