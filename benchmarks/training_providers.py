"""Ways from a ``GPTModel`` to the loss of a policy-gradient step, side by side.

Each provider answers two questions: log-probs of a batch without gradient (the old and the reference policy), and the
loss of a training step, ``-(advantage * log_prob + 0.001 * entropy)``, averaged over the tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from training_models import Batch

__all__ = ["ENTROPY", "PROVIDERS", "TrainingProvider"]

ENTROPY = 0.001
Outputs = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class TrainingProvider:
    """One row of the table.

    Attributes:
        name: as in the CSV.
        outputs: log-probs and entropy ``[1, tokens]``; entropy None if it cannot be had.
        loss: the loss of a step; None computes it from ``outputs``.
        around: entered around all calls of a model.
        needs: raises ImportError, with the reason, if the provider cannot run here.
        main_grad: after the backward, gradients are added to fp32 buffers, as Megatron's DistributedDataParallel does.
        tensor_parallel: works with a sharded vocabulary.
    """

    name: str
    outputs: Callable[[nn.Module, Batch], Outputs]
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    around: Callable[[nn.Module], Any] | None = None
    needs: Callable[[], object] = lambda: None
    main_grad: bool = False
    tensor_parallel: bool = True

    def step_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The scalar of one training step."""
        if self.loss is not None:
            return self.loss(model, batch)
        log_probs, entropy = self.outputs(model, batch)
        per_token = -batch.advantages * log_probs
        if entropy is not None:
            per_token = per_token - ENTROPY * entropy
        return torch.where(batch.labels != -100, per_token, 0.0).sum() / batch.counted


def _inputs(batch: Batch) -> tuple[Tensor, Tensor, None]:
    return batch.ids, batch.positions, None


def _stock(model: nn.Module, batch: Batch) -> Outputs:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    logits = model(*_inputs(batch), packed_seq_params=batch.packed)
    if model.config.tensor_model_parallel_size > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    log_p = torch.log_softmax(logits.float(), -1)
    chosen = log_p.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def _megatron_cross_entropy(model: nn.Module, batch: Batch) -> Outputs:
    """No entropy, and only temperature 1."""
    labels = batch.labels.clamp(min=0)
    return -model(*_inputs(batch), labels=labels, packed_seq_params=batch.packed), None


@contextmanager
def _fused_cross_entropy(model: nn.Module) -> Iterator[None]:
    config = model.config
    before = config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = True, "native"
    try:
        yield
    finally:
        config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = before


def _patched(mode: str) -> Callable[[nn.Module], Any]:
    @contextmanager
    def around(model: nn.Module) -> Iterator[None]:
        import mcore_fused

        mcore_fused.patch_fused_forward(model, mode=mode)
        try:
            yield
        finally:
            mcore_fused.unpatch_fused_forward(model)

    return around


def _ours(*, counted: bool = False) -> Callable[[nn.Module, Batch], Outputs]:
    def outputs(model: nn.Module, batch: Batch) -> Outputs:
        import mcore_fused

        context = mcore_fused.FusedOutputProcessorContext(counted_rows=batch.counted if counted else None)
        output = mcore_fused.call_fused_forward(
            model, *_inputs(batch), labels=batch.labels, context=context, packed_seq_params=batch.packed
        )
        return output.log_probs, output.entropy

    return outputs


def _through_hook(head: Callable[..., Any]) -> Callable[[nn.Module, Batch], Any]:
    """``head(hidden [tokens, H], weight, labels [tokens], batch, group)`` in Megatron's own hook."""

    def run(model: nn.Module, batch: Batch) -> Any:
        group = model.output_layer.tp_group if model.config.tensor_model_parallel_size > 1 else None

        def processor(*, hidden_states: Tensor, output_weight: Tensor | None, **_: Any) -> Any:
            weight = model.output_layer.weight if output_weight is None else output_weight
            return head(hidden_states.flatten(0, 1), weight, batch.labels.T.flatten(), batch, group)

        return model(*_inputs(batch), labels=batch.labels, packed_seq_params=batch.packed, output_processor=processor)

    return run


def _folded(*, counted: bool) -> Callable[[nn.Module, Batch], Tensor]:
    def head(hidden: Tensor, weight: Tensor, labels: Tensor, batch: Batch, group: Any) -> Tensor:
        import mcore_fused

        policy = mcore_fused.PolicyLoss("policy_gradient", entropy_coefficient=ENTROPY)
        return mcore_fused.fused_linear_policy_loss(
            hidden,
            weight,
            labels,
            batch.advantages.T.flatten(),
            policy,
            tp_group=group,
            denominator=float(batch.counted),
            counted_rows=batch.counted if counted else None,
        ).loss

    return _through_hook(head)


def _peer(name: str) -> TrainingProvider:
    """A peer's kernel of the kernel benchmark, in the model's own hook."""
    from kernel_peers import PROVIDERS as KERNELS

    kernel = next(provider for provider in KERNELS if provider.name == name)
    loaded: list[Any] = []

    def needs() -> None:
        loaded.append(kernel.load())

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, batch: Batch, group: Any) -> Outputs:
        del group
        log_probs, entropy = loaded[-1](hidden, weight, labels.clamp(min=0))
        return log_probs.view(batch.labels.shape), entropy.view(batch.labels.shape)

    return TrainingProvider(name, _through_hook(head), needs=needs, tensor_parallel=False)


@contextmanager
def _into_main_grad(model: nn.Module) -> Iterator[None]:
    """The head alone accumulates into ``main_grad``; the rest of the model is as for the other providers."""
    layer = model.output_layer
    with _patched("auto")(model):
        layer.gradient_accumulation_fusion = True
        try:
            yield
        finally:
            layer.gradient_accumulation_fusion = False


PROVIDERS = [
    TrainingProvider("stock logits", _stock),
    TrainingProvider("Megatron's fused cross entropy", _megatron_cross_entropy, around=_fused_cross_entropy),
    TrainingProvider("ours, hook", _ours(), around=_patched("hook")),
    TrainingProvider("ours, legacy", _ours(), around=_patched("legacy")),
    TrainingProvider("ours, counted rows", _ours(counted=True), around=_patched("auto")),
    TrainingProvider("ours, loss folded in", _ours(), _folded(counted=False), around=_patched("hook")),
    TrainingProvider(
        "ours, loss folded in, counted rows", _ours(counted=True), _folded(counted=True), around=_patched("hook")
    ),
    TrainingProvider("ours, gradient added to main_grad", _ours(), around=_patched("auto"), main_grad=True),
    TrainingProvider("ours, gradient accumulation fusion", _ours(), around=_into_main_grad, main_grad=True),
    _peer("verl Triton"),
    _peer("Liger sm_90"),
]
