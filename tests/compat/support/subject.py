"""The implementation under test, reached through a small protocol.

``MCORE_COMPAT_SUBJECT`` names it: ``mcore_fused`` (default), ``stock``, or ``package.module:Class``. A third party
adds one class. Every capability is optional; a check whose capability is missing is deselected and reported as
such by the inventory, never counted as passed.

capability  consequence of its absence
call        nothing can be judged
patch       no patch algebra (idempotence, residue, copies, foreign patches)
mode        no mode detection
legacy      no comparison of forced legacy mode with the hook
kernel      no kernel properties
refusal     no check that unsupported models are refused
evidence    a green run is called unproven
factories   no forward functions for padded and jagged micro-batches, no packing
schedule_plan  no fused 1F1B schedule plans
float64     numbers are compared in fp32 with its error bound
"""

import contextlib
import importlib
import os
from typing import Any, Protocol

import torch


class Output(Protocol):
    """What a fused call returns."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


class Subject(Protocol):
    """An implementation of the fused forward."""

    name: str
    capabilities: frozenset[str]

    def patch(self, model: Any, mode: str = "auto") -> None:
        """Install on a model (wrapped or not) or on a list of chunks."""

    def unpatch(self, model: Any) -> None:
        """Remove; afterwards the model is what it was."""

    def mode(self, model: Any) -> str:
        """ "hook" or "legacy"."""

    def call(self, model: Any, *inputs: Any, labels: Any, temperature: Any = 1.0, **kwargs: Any) -> Output:
        """One fused call on a patched model."""

    def evidence(self) -> dict[str, int]:
        """hook_calls, deferred_head_calls, kernel_launches, unfused_fallbacks of this process so far."""


class McoreFused:
    """This project's own library."""

    name = "mcore_fused"
    capabilities = frozenset(
        {"call", "patch", "mode", "legacy", "kernel", "refusal", "evidence", "float64", "factories", "schedule_plan"}
    )

    def patch(self, model, mode="auto"):
        import mcore_fused

        mcore_fused.patch_fused_forward(model, mode)

    def unpatch(self, model):
        import mcore_fused

        mcore_fused.unpatch_fused_forward(model)

    def mode(self, model):
        import mcore_fused

        return mcore_fused.fused_forward_mode(model)

    def call(self, model, *inputs, labels, temperature=1.0, **kwargs):
        import mcore_fused

        return mcore_fused.call_fused_forward(model, *inputs, labels=labels, temperature=temperature, **kwargs)

    def evidence(self):
        from mcore_fused import evidence

        seen = evidence.of_process()
        return {
            "hook_calls": seen.hook_calls,
            "deferred_head_calls": seen.deferred_head_calls,
            "kernel_launches": seen.kernel_launches,
            "unfused_fallbacks": seen.unfused_fallbacks,
        }


class StockOutput:
    """Log-probs and entropy of materialised logits."""

    def __init__(self, log_probs, entropy):
        self.log_probs = log_probs
        self.entropy = entropy


class Stock:
    """The trivial subject: stock logits, then log-softmax. Green wherever it applies, or the suite is wrong."""

    name = "stock"
    capabilities = frozenset({"call", "float64"})

    def patch(self, model, mode="auto"):
        """Nothing to install."""

    def unpatch(self, model):
        """Nothing to remove."""

    def mode(self, model):
        raise LookupError("the stock subject has no mode")

    def call(self, model, *inputs, labels, temperature=1.0, **kwargs):
        from .models import unwrapped
        from .reference import stock_forward

        if labels is None:
            return model(*inputs, **kwargs)
        stock = stock_forward(unwrapped(model), *inputs, labels=labels, temperature=temperature, **kwargs)
        dtype = torch.float64 if stock.logits.dtype is torch.float64 else torch.float32
        return StockOutput(stock.log_probs.to(dtype), stock.entropy.to(dtype))

    def evidence(self):
        return dict.fromkeys(("hook_calls", "deferred_head_calls", "kernel_launches", "unfused_fallbacks"), 0)


def load_subject() -> Subject:
    """The subject that the environment names."""
    name = os.environ.get("MCORE_COMPAT_SUBJECT", "mcore_fused")
    if name == "mcore_fused":
        return McoreFused()
    if name == "stock":
        return Stock()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"MCORE_COMPAT_SUBJECT={name!r}; allowed: mcore_fused, stock, package.module:Class")
    return getattr(importlib.import_module(module), attribute)()


@contextlib.contextmanager
def patched(subject: Subject, model: Any, mode: str = "auto"):
    """Patch for a block, and always take it back."""
    subject.patch(model, mode)
    try:
        yield model
    finally:
        subject.unpatch(model)
