"""The reference for numbers: the model's own logits, then a float64 log-softmax.

The logits are taken where stock Megatron hands them to its loss. They contain MuP's scaling, MTP and every release's
own rules, and nothing of the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["StockResult", "assert_same_gradients", "gradients", "log_probs_and_entropy", "stock_forward"]


@dataclass
class StockResult:
    """What the untouched model gives.

    Attributes:
        log_probs: ``[batch, seq]``, float64.
        entropy: ``[batch, seq]``, float64.
        logits: ``[seq, batch, vocab]`` as handed to the loss; of all ranks if the vocabulary is split over ranks.
        loss: ``[batch, seq]``, the cross entropy that stock returns.
    """

    log_probs: Tensor
    entropy: Tensor
    logits: Tensor
    loss: Tensor


def log_probs_and_entropy(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Float64 log-softmax of logits.

    Args:
        logits: ``[..., vocab]``.
        labels: ``[...]``. An ignored label (-100) gives 0 and 0, another one outside the vocabulary a log-prob of NaN.
        temperature: one number, or ``[...]``.

    Returns:
        Log-probs of the labels and entropy, both ``[...]``.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[..., None]
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    ignored = labels == -100
    columns = logits.shape[-1]
    chosen = log_probs.gather(-1, labels.clamp(0, columns - 1).long()[..., None])[..., 0]
    chosen = torch.where((labels >= 0) & (labels < columns), chosen, torch.nan)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    zero = torch.zeros((), dtype=torch.float64, device=logits.device)
    return torch.where(ignored, zero, chosen), torch.where(ignored, zero, entropy)


def stock_forward(
    model: Any, *inputs: Any, labels: Tensor, temperature: float | Tensor = 1.0, **kwargs: Any
) -> StockResult:
    """Run the untouched model with labels, and read the logits that its loss is given for these labels.

    Args:
        model: the language model itself, without wrappers; its ``compute_language_model_loss`` is watched.
        *inputs: positional arguments of the model's forward.
        labels: ``[batch, seq]``.
        temperature: one number, or ``[batch, seq]``.
        **kwargs: further arguments of the model's forward.
    """
    seen = []
    stock_loss = model.compute_language_model_loss

    def reading_loss(some_labels: Tensor, logits: Tensor) -> Any:
        if some_labels is labels:
            seen.append(logits)
        return stock_loss(some_labels, logits.clone())  # stock's loss works in place on fp32 logits

    model.compute_language_model_loss = reading_loss
    try:
        loss = model(*inputs, labels=labels, **kwargs)
    finally:
        del model.compute_language_model_loss
    (logits,) = seen
    logits = _whole_vocabulary(model, logits)
    if isinstance(temperature, Tensor):
        temperature = temperature.transpose(0, 1)
    log_probs, entropy = log_probs_and_entropy(logits, labels.transpose(0, 1), temperature)
    return StockResult(log_probs.transpose(0, 1), entropy.transpose(0, 1), logits, loss)


def _whole_vocabulary(model: Any, logits: Tensor) -> Tensor:
    """Logits of all tensor-parallel ranks, from this rank's; the backward gives each rank its own part back."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    if parallel_state.get_tensor_model_parallel_world_size() == 1 or not getattr(model, "parallel_output", True):
        return logits
    whole: Tensor = gather_from_tensor_model_parallel_region(logits)
    return whole


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameter gradients by name; clears them."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Assert that both runs have the same gradients, by relative Frobenius norm."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name].double() - gradient.double()).norm()
        scale = max(gradient.double().norm().item(), 1e-30)
        assert difference <= tolerance * scale, f"{name}: relative difference {difference / scale:.3g}"
