"""Stock logits and a log-softmax as a subject."""

import torch

from mcore_compat.subjects.protocol import COUNTERS
from mcore_compat.testing.models import unwrapped
from mcore_compat.testing.reference import stock_forward


class StockOutput:
    """Log-probs and entropy of materialised logits."""

    def __init__(self, log_probs, entropy):
        self.log_probs = log_probs
        self.entropy = entropy


class Stock:
    """The trivial subject: stock logits, then log-softmax. Green wherever it applies, or the suite is wrong."""

    name = "stock"
    capabilities = frozenset(
        {"call", "float64", "ignored_labels", "temperature_per_token", "label_range", "mup", "mtp"}
    )

    def patch(self, model, mode="auto"):
        """Nothing to install."""

    def unpatch(self, model):
        """Nothing to remove."""

    def mode(self, model):
        raise LookupError("the stock subject has no mode")

    def call(self, model, *inputs, labels, temperature=1.0, **kwargs):
        if labels is None:
            return model(*inputs, **kwargs)
        stock = stock_forward(unwrapped(model), *inputs, labels=labels, temperature=temperature, **kwargs)
        dtype = torch.float64 if stock.logits.dtype is torch.float64 else torch.float32
        return StockOutput(stock.log_probs.to(dtype), stock.entropy.to(dtype))

    def evidence(self):
        return dict.fromkeys(COUNTERS, 0)
