"""verl with torch in its kernel's place, so that its patch and its forward functions run on a CPU. For tests only."""

import torch
from support.subjects.verl import Verl, load


def _log_probs_and_entropy(hidden, weight, labels, temperature):
    log_probs = torch.log_softmax((hidden.double() @ weight.double().t()) / temperature, -1)
    chosen = log_probs.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return chosen.float(), -(log_probs.exp() * log_probs).sum(-1).float()


def torch_kernel(hidden, weight, labels, temperature=1.0, reduction="none", group=None):
    """The arguments and the flat outputs of verl's kernel: hidden and labels are flattened as they lie in memory."""
    assert reduction == "none"
    return _log_probs_and_entropy(hidden.view(-1, hidden.shape[-1]), weight, labels.view(-1), temperature)


def verl_on_torch(monkeypatch):
    """The subject, its kernel replaced for as long as ``monkeypatch`` lasts."""
    module = load()
    for name in ("fused_output_processor", "linear_cross_entropy"):
        monkeypatch.setattr(module, name, getattr(module, name))  # the subject's counting ends with the test, too
    monkeypatch.setattr(module, "linear_cross_entropy", torch_kernel)
    return Verl()
