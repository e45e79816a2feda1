"""The implementation under test, reached through a small protocol.

``MCORE_COMPAT_SUBJECT`` names it: ``mcore_fused`` (default), ``stock``, ``verl``, ``path/to/file.py:Class`` or
``package.module:Class``. A third party adds one class. Every capability but ``call`` is optional; a check whose
capability is missing is deselected, and the report says so with the consequence; it never counts as passed.
"""

import contextlib
import importlib
import importlib.util
import os
from typing import Any, Protocol

import torch

# Every capability, with the consequence of its absence.
CAPABILITIES = {
    "call": "nothing can be judged",
    "patch": "no patch algebra (idempotence, residue, copies, foreign patches), no parallel ranks, no training",
    "mode": "no mode detection, so the expected mode of a cell is not asked for",
    "legacy": "no comparison of forced legacy mode with the hook, no futures",
    "kernel": "no kernel properties",
    "refusal": "no check that unsupported models and calls are refused",
    "evidence": "nothing is counted; a subject that patches models is then called unproven",
    "factories": "no forward functions for padded and jagged micro-batches, no packing",
    "jagged": "no forward function for jagged micro-batches on the GPU lane",
    "ignored_labels": "no check that an ignored label (-100) gives exactly zero",
    "temperature_per_token": "one temperature a batch, none for each token",
    "schedule_plan": "no fused 1F1B schedule plans",
    "float64": "no numbers against the float64 reference",
}


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

    def jagged_forward(self, mode: str = "auto") -> Any:
        """The forward function for jagged micro-batches, with the signature of verl's engine forward."""

    def evidence(self) -> dict[str, int]:
        """hook_calls, deferred_head_calls, kernel_launches, unfused_fallbacks of this process so far."""


class McoreFused:
    """This project's own library."""

    name = "mcore_fused"
    capabilities = frozenset(CAPABILITIES)

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

    def jagged_forward(self, mode="auto"):
        from mcore_fused.frameworks.forward import fused_forward_no_padding_gen

        return fused_forward_no_padding_gen(mode=mode)

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
    if name == "verl":
        from .verl_subject import Verl

        return Verl()
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"MCORE_COMPAT_SUBJECT={name!r}; allowed: mcore_fused, stock, verl, file.py:Name, module:Name")
    found = getattr(_module(place), attribute)()
    unknown = set(found.capabilities) - CAPABILITIES.keys()
    if unknown or "call" not in found.capabilities:
        raise ValueError(f"{name!r} has unknown capabilities {sorted(unknown)}, or no `call`; known: {[*CAPABILITIES]}")
    return found


def _module(place: str) -> Any:
    """By name, or from a file."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location("subject_under_test", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def patched(subject: Subject, model: Any, mode: str = "auto"):
    """Patch for a block, and always take it back."""
    subject.patch(model, mode)
    try:
        yield model
    finally:
        subject.unpatch(model)
