"""What a rank does with a small model of experts: one step with its own part of the parameters and of the batch.

Everything comes back under the names that one rank's whole model has, with what it takes to put the parts together.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state

from mcore_compat.testing.reference import stock_forward
from support.models import DEVICE, Shape, batch_for, build
from support.subjects import load_subject, patched

EXPERTS = 4
TEMPERATURE = 0.7
ROWS, WIDTH = 2, 8  # of each data-parallel rank


@dataclass(frozen=True)
class Part:
    """One rank's gradient of one parameter of the whole model.

    Attributes:
        gradient: the tensor.
        place: data-parallel and tensor-parallel rank.
        split: dimension that is split over tensor-parallel ranks, or None.
        partial: under sequence parallelism each tensor-parallel rank has the part of its own tokens.
    """

    gradient: torch.Tensor
    place: tuple[int, int]
    split: int | None
    partial: bool


def whole_batch(vocab, ranks, seed=4):
    """The rows of all data-parallel ranks in one batch."""
    return batch_for(vocab, ROWS * ranks, WIDTH, seed=seed)


def own_batch(vocab, seed=4):
    """This data-parallel rank's rows of it."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    whole, rows = whole_batch(vocab, ranks, seed), slice(ROWS * rank, ROWS * (rank + 1))
    return replace(whole, ids=whole.ids[rows], positions=whole.positions[rows], labels=whole.labels[rows]), rows


def upstream_gradients(rows, ranks):
    """Gradients of log-probs and entropy; they belong to the rows, whoever has them."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, ROWS * ranks, WIDTH, generator=generator, dtype=torch.float64)
    return (weights * torch.tensor([1.0, -0.3])[:, None, None])[:, rows].to(DEVICE)


def loss_of(log_probs, entropy, rows, ranks):
    """A weighted sum of what comes back."""
    return (upstream_gradients(rows, ranks) * torch.stack((log_probs, entropy))).sum()


def whole_name(name, shape, stage, expert_rank):
    """What the whole model calls a parameter of one pipeline stage and one rank of experts."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + stage * shape.layers // shape.pp)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(int(parts[place]) + expert_rank * shape.experts // shape.ep)
    if name == "output_layer.weight" and shape.tied:
        return "embedding.word_embeddings.weight"
    return ".".join(parts)


def _own_name(name, shape):
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return whole_name(name, shape, stage, parallel_state.get_expert_model_parallel_rank())


def _split_of(parameter, whole):
    if parameter.shape == whole:
        return None
    return next(axis for axis, size in enumerate(whole) if parameter.shape[axis] != size)


def load_own_part(model, shape, state):
    """Copy this rank's part of a whole model's parameters: {name: tensor}."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = state[_own_name(name, shape)].to(parameter.device)
            split = _split_of(parameter, value.shape)
            if split is not None:
                value = value.chunk(shape.tp, dim=split)[rank]
            parameter.copy_(value)


def whole_moe_step(shape: Shape, ranks: int):
    """The stock model on one rank, on the rows of all data-parallel ranks; and the parameters to start from."""
    model, batch = build(shape), whole_batch(shape.vocab, ranks)
    state = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    output = stock_forward(model, *batch.inputs, labels=batch.labels, temperature=TEMPERATURE)
    loss_of(output.log_probs, output.entropy, slice(None), ranks).backward()
    return {
        "state": state,
        "log_probs": output.log_probs.detach(),
        "entropy": output.entropy.detach(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "tokens": _routed(model, batch),
    }


def _routed(model, batch):
    """How many tokens the first layer's router gives to each expert."""
    counts = []
    handle = model.decoder.layers[0].mlp.router.register_forward_hook(
        lambda _module, _args, found: counts.append(found[1].sum(0))
    )
    with torch.no_grad():
        model(*batch.inputs)
    handle.remove()
    return counts[0]


def moe_steps(shape: Shape, modes: tuple, state: dict):
    """One fused step in each mode; the ranks are started once for all of them."""
    return {mode: _moe_step(shape, mode, state) for mode in modes}


def _moe_step(shape, mode, state):
    """One fused step on this rank, through all pipeline stages."""
    subject, model = load_subject(), _own_model(shape)
    load_own_part(model, shape, state)
    batch, rows = own_batch(shape.vocab)
    received = _receive(shape, model)
    with patched(subject, model, mode):
        output = subject.call(model, *batch.inputs, labels=batch.labels, temperature=TEMPERATURE)
    found = {"rows": rows, "experts": parallel_state.get_expert_model_parallel_rank()}
    if parallel_state.is_pipeline_last_stage():
        ranks = parallel_state.get_data_parallel_world_size()
        loss_of(output.log_probs, output.entropy, rows, ranks).backward()
        found |= {"log_probs": output.log_probs.detach(), "entropy": output.entropy.detach()}
    else:
        peer = parallel_state.get_pipeline_model_parallel_next_rank()
        torch.distributed.send(output.detach().contiguous(), peer)
        gradient = torch.empty_like(output)
        torch.distributed.recv(gradient, peer)
        output.backward(gradient)
    if received is not None:
        torch.distributed.send(received.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
    return found | {"parts": parts_of(model, shape, state), "evidence": dict(subject.evidence())}


def _own_model(shape):
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return build(replace(shape, pre_process=first, post_process=last))


def _receive(shape, model):
    """The hidden states of the stage before, handed to the model."""
    if parallel_state.is_pipeline_first_stage():
        return None
    hidden = torch.empty(WIDTH, ROWS, shape.hidden, dtype=shape.dtype, device=DEVICE)
    torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
    model.set_input_tensor(hidden.requires_grad_())
    return hidden


def parts_of(model, shape, state):
    """This rank's gradients, under the names of the whole model."""
    place = (parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    found = []
    for name, parameter in model.named_parameters():
        whole = _own_name(name, shape)
        split = _split_of(parameter, state[whole].shape)
        partial = split is None and getattr(parameter, "sequence_parallel", False)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append((whole, Part(gradient.detach().cpu(), place, split, partial)))
    return found


def gathered(results):
    """The whole model's gradients from all ranks' parts, and the largest difference between replicas.

    Data-parallel ranks have a sum each; an expert has its whole sum where it is. Stages that share the embedding add
    theirs.
    """
    whole, drift = {}, 0.0
    for result in results:
        for name, part in result["parts"]:
            whole.setdefault(name, {}).setdefault(part.place[0], []).append(part)
    gradients = {}
    for name, by_rank in whole.items():
        total = 0
        for parts in by_rank.values():
            summed, apart = _over_tensor_ranks(parts)
            total, drift = total + summed, max(drift, apart)
        gradients[name] = total
    return gradients, drift


def _over_tensor_ranks(parts):
    """Parts of one data-parallel rank: one or two stages of one or two tensor-parallel ranks."""
    by_rank = {}
    for part in parts:
        by_rank.setdefault(part.place[1], []).append(part)
    sums = [sum(part.gradient for part in by_rank[rank]) for rank in sorted(by_rank)]
    split, partial = parts[0].split, parts[0].partial
    if len(sums) == 1:
        return sums[0], 0.0
    if split is not None:
        return torch.cat(sums, dim=split), 0.0
    if partial:  # Megatron sums these over the group after backward
        return sum(sums), 0.0
    return sums[0], max((other - sums[0]).norm().item() for other in sums[1:])
