"""A subject that is wrong on purpose, for the live controls: checks that pass with it cannot fail here."""

from types import SimpleNamespace

import torch

from mcore_compat.subjects.protocol import COUNTERS
from mcore_compat.testing.models import unwrapped


class Spoiled:
    """The subject under test with every promise broken: other numbers, logits, refusals and counters.

    Log-probs and entropy are shifted, the whole logits are computed beside the fused head, what the subject refuses
    is answered with zeros, and no call is counted.
    """

    def __init__(self, subject):
        self._subject = subject
        self.name = f"spoiled {subject.name}"
        self.capabilities = subject.capabilities

    def __getattr__(self, name):
        return getattr(self._subject, name)

    def call(self, model, *inputs, labels, temperature=1.0, **kwargs):
        try:
            output = self._subject.call(model, *inputs, labels=labels, temperature=temperature, **kwargs)
        except (TypeError, ValueError):
            nothing = torch.zeros(inputs[0].shape, dtype=torch.float64, device=inputs[0].device, requires_grad=True)
            return SimpleNamespace(log_probs=nothing, entropy=nothing)
        if labels is None:
            return output
        with torch.no_grad():
            unwrapped(model)(*inputs)
        return SimpleNamespace(log_probs=0.5 * output.log_probs - 0.25, entropy=0.5 * output.entropy + 0.25)

    def evidence(self):
        return dict.fromkeys(COUNTERS, 0)
