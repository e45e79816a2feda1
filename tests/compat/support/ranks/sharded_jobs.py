"""What a rank does in the checks of sharded models; module-level functions, so that they can be sent to a rank."""

from support.models import Shape, build
from support.ranks.sharded import (
    MODES,
    Layout,
    batches,
    descend,
    full,
    head_is_shard,
    hidden_gradients,
    loss_of,
    outputs,
    own_rank,
    shard,
    temperature_for,
)
from support.subjects import load_subject, patched

STEPS = 5


def _own(shape):
    return batches(shape)[own_rank()]


def whole_step(subject, shape: Shape):
    """The unsharded model on every rank's batch: this rank's outputs, and gradients as the mean over the ranks.

    Unfused, but for tensor parallelism, of which the fused one is proved elsewhere.
    """
    model, results = build(shape), []
    mode = "stock" if shape.tp == 1 else "legacy"
    with hidden_gradients(model) as hidden:
        for batch in batches(shape):
            log_probs, entropy = outputs(subject, model, model, batch, mode)
            loss_of(log_probs, entropy, batch.labels).backward()
            results.append({"log_probs": log_probs.detach(), "entropy": entropy.detach(), "hidden": hidden[-1]})
    gradients = {name: parameter.grad / len(results) for name, parameter in model.named_parameters()}
    return results[own_rank()] | {"gradients": gradients}


def sharded_step(subject, shape: Shape, layout: Layout, mode: str):
    """One forward and backward, and what this rank holds of the head's weight after each."""
    batch, model = _own(shape), build(shape)
    chain, seen = shard(model, layout), []
    # Runs after the unit's own hook: the storage that the head's product reads.
    handle = model.output_layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    found = subject.mode(chain) if mode == "auto" else None
    before = head_is_shard(model)
    with hidden_gradients(model) as hidden:
        log_probs, entropy = outputs(subject, chain, model, batch, mode)
        between = head_is_shard(model)
        loss_of(log_probs, entropy, batch.labels).backward()
    handle.remove()
    gathered = [weight.untyped_storage().size() for weight in seen if weight is not None]
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden[0],
        "gradients": {name: full(parameter.grad) for name, parameter in model.named_parameters()},
        "shard": (before, between, head_is_shard(model)),
        "gathered_bytes": sum(gathered),
        "mode": found,
    }


def step_job(shape: Shape, layout: Layout):
    """One step of the whole model, and of the sharded one in each mode."""
    subject = load_subject()
    modes = MODES if shape.tp == 1 else MODES[1:]
    found = {mode: sharded_step(subject, shape, layout, mode) for mode in modes}
    launches = subject.evidence()["kernel_launches"]
    return found | {"whole": whole_step(subject, shape), "kernel_launches": launches}


def whole_training(shape: Shape):
    """Losses of five SGD steps of the whole model on the mean of the ranks' losses, on this rank's batch."""
    model, curve = build(shape), []
    for _ in range(STEPS):
        for rank, batch in enumerate(batches(shape)):
            loss = loss_of(*outputs(None, model, model, batch, "stock"), batch.labels)
            loss.backward()
            if rank == own_rank():
                curve.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= rank + 1
        descend(model.parameters())
    return curve


def _training(subject, shape, layout, mode):
    batch, model = _own(shape), build(shape)
    chain, curve = shard(model, layout), []
    for _ in range(STEPS):
        loss = loss_of(*outputs(subject, chain, model, batch, mode), batch.labels)
        loss.backward()
        descend(model.parameters())
        curve.append(loss.item())
    return {"curve": curve, "parameters": {name: full(p.detach()) for name, p in model.named_parameters()}}


def training_job(shape: Shape, layout: Layout):
    """Five SGD steps of the whole model, and of the sharded one in each mode."""
    subject = load_subject()
    found = {mode: _training(subject, shape, layout, mode) for mode in MODES}
    return found | {"whole": {"curve": whole_training(shape)}}


def step_and_training_job(shape: Shape, layout: Layout):
    """Both, in one set of processes."""
    return {"step": step_job(shape, layout), "training": training_job(shape, layout)}


def failing_job(shape: Shape, layout: Layout):
    """For each mode: a fused call that fails inside the head, and then a good step of this model and of a fresh one."""
    return {mode: _failing(shape, layout, mode) for mode in ("auto", "legacy")}


def _failing(shape, layout, mode):
    subject, batch, results = load_subject(), _own(shape), {}
    model = build(shape)
    chain = shard(model, layout)
    with patched(subject, chain, mode):
        try:
            subject.call(chain, *batch.inputs, labels=batch.labels[:, :-1], temperature=1.0)
        except Exception as error:  # noqa: BLE001 - the check looks at it
            results["error"] = f"{type(error).__name__}: {error}"
    results["shard"] = head_is_shard(model)
    fresh = build(shape)
    for name, held, inner in (("again", chain, model), ("fresh", shard(fresh, layout), fresh)):
        log_probs, entropy = outputs(subject, held, inner, batch, mode)
        loss_of(log_probs, entropy, batch.labels).backward()
        results[name] = {
            "log_probs": log_probs.detach(),
            "gradients": {key: full(parameter.grad) for key, parameter in inner.named_parameters()},
        }
    return results


def refused_job(shape: Shape, layout: Layout, helds=("chain",)):
    """What patching (the "inner" model or the "chain") and one call raise, and at which stage, by what and mode."""
    return {(held, mode): _refused(shape, layout, mode, held) for held in helds for mode in ("auto", "legacy")}


def _refused(shape, layout, mode, held):
    subject, batch, model = load_subject(), _own(shape), build(shape)
    chain = shard(model, layout)
    stage = "patch"
    try:
        with patched(subject, model if held == "inner" else chain, mode):
            stage = "call"
            subject.call(chain, *batch.inputs, labels=batch.labels, temperature=temperature_for(batch))
    except Exception as error:  # noqa: BLE001 - the check looks at it
        return stage, f"{type(error).__name__}: {error}"
    return "none", ""
