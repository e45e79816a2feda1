"""What a rank does in the parallel checks; module-level functions, so that they can be sent to a rank."""

from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

from mcore_compat.testing.reference import log_probs_and_entropy, stock_forward
from support.models import DEVICE, Shape, batch_for, build
from support.subjects import load_subject, patched

WEIGHTS = (1.0, -0.3)  # of the log-probs and of the entropy in the loss


def _weights(labels):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(2, *labels.shape, generator=generator, dtype=torch.float64).to(labels.device)
    return values[0] * WEIGHTS[0], values[1] * WEIGHTS[1]


def _loss(output, labels):
    log_prob_weights, entropy_weights = _weights(labels)
    return (log_prob_weights * output.log_probs + entropy_weights * output.entropy).sum()


def _parameters(model):
    """Gradient, and how the parameter is split over tensor-parallel ranks, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", 0) else None
            found[name] = (parameter.grad.clone(), split, getattr(parameter, "sequence_parallel", False))
    return found


def _run(subject, model, batch, mode, *, temperature=0.7, **kwargs):
    if mode == "stock":
        return stock_forward(model, *batch.inputs, labels=batch.labels, temperature=temperature, **kwargs)
    with patched(subject, model, mode):
        return subject.call(model, *batch.inputs, labels=batch.labels, temperature=temperature, **kwargs)


def tensor_parallel_step(shape: Shape, mode: str):
    """One step on this rank: outputs, gradients, and the gradient of the hidden states under the head."""
    subject, model, batch = load_subject(), build(shape), batch_for(shape.vocab, 2, 8)
    hidden_gradients = []

    def watch(_module, _args, hidden):
        hidden.register_hook(lambda gradient: hidden_gradients.append(gradient.clone()))

    handle = model.decoder.register_forward_hook(watch)
    output = _run(subject, model, batch, mode)
    handle.remove()
    _loss(output, batch.labels).backward()
    return {
        "log_probs": output.log_probs.detach(),
        "entropy": output.entropy.detach(),
        "hidden_gradient": hidden_gradients[0],
        "gradients": _parameters(model),
        "evidence": subject.evidence(),
    }


def _stage_state(full: dict, stage: int, layers: int) -> dict:
    """Parameters of one of two pipeline stages, taken from a whole model's."""
    own = {}
    for name, value in full.items():
        if name.startswith("decoder.layers."):
            _, _, index, rest = name.split(".", 3)
            if int(index) // (layers // 2) == stage:
                own[f"decoder.layers.{int(index) % (layers // 2)}.{rest}"] = value
        else:
            own[name] = value
    return own


def pipeline_step(shape: Shape, mode: str, full_state: dict):
    """One step of a two-stage pipeline: forward from stage 0 to 1, backward from 1 to 0."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    subject = load_subject()
    model = build(replace(shape, pre_process=stage == 0, post_process=stage == 1))
    own = _stage_state(full_state, stage, shape.layers)
    tied_copy = full_state["embedding.word_embeddings.weight"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "output_layer.weight" and shape.tied:
                # With MTP this parameter is allocated and never used: give it what a wrong reader would notice.
                parameter.copy_(torch.full_like(parameter, 3.0) if shape.mtp else tied_copy)
            else:
                parameter.copy_(own[name])
    batch = batch_for(shape.vocab, 2, 8)
    kwargs = {"loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)} if shape.mtp else {}
    if stage == 0:
        hidden = _run_stage(subject, model, batch, mode, kwargs)
        torch.distributed.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        torch.distributed.recv(gradient, 1)
        hidden.backward(gradient)
        return {"gradients": _parameters(model)}
    received = torch.empty(8, 2, shape.hidden, dtype=shape.dtype, device=DEVICE)
    torch.distributed.recv(received, 0)
    received.requires_grad_()
    model.set_input_tensor(received)
    output = _run(subject, model, batch, mode, **kwargs)
    _loss(output, batch.labels).backward()
    torch.distributed.send(received.grad, 0)
    return {
        "log_probs": output.log_probs.detach(),
        "entropy": output.entropy.detach(),
        "gradients": _parameters(model),
        "mode": subject.mode(model),
    }


def _run_stage(subject, model, batch, mode, kwargs):
    """A stage without a head hands its hidden states on, whatever was asked."""
    if mode == "stock":
        return model(*batch.inputs, labels=batch.labels, **kwargs)
    with patched(subject, model, mode):
        return subject.call(model, *batch.inputs, labels=batch.labels, **kwargs)


def whole_model_step(shape: Shape, mode: str):
    """The single-rank result, and the parameters that a pipeline must start from."""
    subject, model, batch = load_subject(), build(shape), batch_for(shape.vocab, 2, 8)
    kwargs = {"loss_mask": torch.ones_like(batch.labels, dtype=torch.float32)} if shape.mtp else {}
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    output = _run(subject, model, batch, mode, **kwargs)
    _loss(output, batch.labels).backward()
    return {
        "state": state,
        "log_probs": output.log_probs.detach(),
        "entropy": output.entropy.detach(),
        "gradients": _parameters(model),
    }


def whole_head_step(mode: str):
    """A head that is whole on every rank, by a group of its own, while the model's group has two ranks."""
    subject, rank = load_subject(), torch.distributed.get_rank()
    own = [torch.distributed.new_group([each]) for each in range(2)][rank]
    model, batch = build(Shape(vocab=96, tp=2)), batch_for(96, 2, 8)
    torch.manual_seed(3)
    layer = ColumnParallelLinear(
        32, 96, config=model.config, init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False, tp_group=own
    )
    model.output_layer = layer.to(device=DEVICE, dtype=torch.float64)
    with torch.no_grad():
        logits = model(*batch.inputs)
        output = _run(subject, model, batch, mode, temperature=1.0)
    log_probs, entropy = log_probs_and_entropy(logits, batch.labels)
    return {"log_probs": (output.log_probs, log_probs), "entropy": (output.entropy, entropy)}
