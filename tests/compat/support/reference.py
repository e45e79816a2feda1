"""The reference for numbers: the same model's stock logits, then a float64 log-softmax.

The stock logits are taken where stock Megatron hands them to its loss, so that MuP's scaling, MTP and every
version's own rules are in them, and nothing of the subject is.
"""

from dataclasses import dataclass

import torch


@dataclass
class Stock:
    """Log-probs and entropy ``[batch, seq]`` in float64, and the logits ``[seq, batch, vocab]`` they come from."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    logits: torch.Tensor


def log_probs_and_entropy(logits, labels, temperature=1.0):
    """Float64 log-softmax of ``logits`` ``[..., vocab]``; labels and a tensor temperature are ``[...]``.

    An ignored label (-100) gives 0 and 0, another label outside the vocabulary a log-prob of NaN.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[..., None]
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    ignored = labels == -100
    columns = logits.shape[-1]
    chosen = log_probs.gather(-1, labels.clamp(0, columns - 1).long()[..., None])[..., 0]
    chosen = torch.where((labels >= 0) & (labels < columns), chosen, torch.nan)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    zero = torch.zeros((), dtype=torch.float64, device=logits.device)
    return torch.where(ignored, zero, chosen), torch.where(ignored, zero, entropy)


def stock_forward(model, *inputs, labels, temperature=1.0, **kwargs) -> Stock:
    """Run the untouched model with labels, and read the logits its loss is given for these labels."""
    seen = []
    stock_loss = model.compute_language_model_loss

    def reading_loss(some_labels, logits):
        if some_labels is labels:
            seen.append(logits)
        return stock_loss(some_labels, logits.clone())  # stock's loss works in place on fp32 logits

    model.compute_language_model_loss = reading_loss
    try:
        # An ignored label is no vocabulary index; what stock's loss makes of it is not looked at.
        model(*inputs, labels=labels, **kwargs)
    finally:
        del model.compute_language_model_loss
    (logits,) = seen
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.transpose(0, 1)
    log_probs, entropy = log_probs_and_entropy(logits, labels.transpose(0, 1), temperature)
    return Stock(log_probs.transpose(0, 1), entropy.transpose(0, 1), logits)


def gradients(model) -> dict[str, torch.Tensor]:
    """Copies of all parameter gradients by name; clears them."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(actual: dict, expected: dict, tolerance: float) -> None:
    """Every gradient of one run has its equal in the other, by relative Frobenius norm."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name].double() - gradient.double()).norm()
        scale = max(gradient.double().norm().item(), 1e-30)
        assert difference <= tolerance * scale, f"{name}: relative difference {difference / scale:.3g}"
