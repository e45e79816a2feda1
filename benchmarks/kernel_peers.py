"""The kernels that are compared: ours in several settings, and everyone else's, each behind one small adapter.

An adapter returns ``(log_probs, entropy or None)`` per token, or ``(None, loss)``-like scalars for peers that only
reduce. A peer that cannot be imported is reported with the reason, not hidden.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, Any]]


@dataclass(frozen=True)
class Provider:
    """One row of the tables.

    Attributes:
        name: as in the CSV.
        load: imports what is needed and returns the callable.
        entropy: gives the entropy too.
        scalar: only a reduced loss, in place of per-token log-probs.
        floor: what its step is measured against: "8NHV" recomputes the logits once, "6NHV" does not.
        distribution: whose version is recorded.
        around: entered around every call and its backward.
        own_backward: the call makes the gradients itself (a folded loss); a forward row makes no sense.
    """

    name: str
    load: Callable[[], Run]
    entropy: bool = True
    scalar: bool = False
    floor: str = "8NHV"
    distribution: str = ""
    own_backward: bool = False
    around: Callable[[], AbstractContextManager] = nullcontext

    def version(self) -> str:
        return metadata.version(self.distribution) if self.distribution else ""


def _ours(**options: Any) -> Callable[[], Run]:
    def load() -> Run:
        from mcore_fused.kernel import linear_cross_entropy

        return lambda h, w, y: linear_cross_entropy(h, w, y, backend="triton", **options)

    return load


@contextmanager
def _gluon_disabled() -> Iterator[None]:
    """Plain Triton also where Gluon could run."""
    from mcore_fused.kernel import launchers

    opened = launchers.gluon_enabled
    launchers.gluon_enabled = lambda *_: False
    try:
        yield
    finally:
        launchers.gluon_enabled = opened


def _ours_folded() -> Run:
    from mcore_fused.kernel import PolicyLoss, fused_linear_policy_loss

    policy = PolicyLoss("policy_gradient", entropy_coefficient=0.01)

    def run(h, w, y):
        advantages = torch.ones(y.shape, device=y.device)
        return None, fused_linear_policy_loss(h, w, y, advantages, policy, backend="triton").loss

    return run


def eager(h, w, y):
    logits = (h @ w.t()).float()
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _compiled() -> Run:
    torch.compiler.reset()  # the limit of recompilations counts all shapes: past it the function silently runs eager
    return torch.compile(eager, dynamic=False)


def _verl() -> Run:
    """Only the kernel's own modules: the package's top imports Ray and the trainers, which play no part here."""
    for name in ("verl", "verl.utils"):
        if name not in sys.modules:
            spec = importlib.util.find_spec("verl") if name == "verl" else None
            paths = (
                list(spec.submodule_search_locations) if spec else [p + "/utils" for p in sys.modules["verl"].__path__]
            )
            module = types.ModuleType(name)
            module.__path__ = paths
            sys.modules[name] = module
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda h, w, y: linear_cross_entropy(h, w, y, 1.0, "none", None)


def _liger() -> Run:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def run(h, w, y):
        loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(h, w, y, 1.0, -100, 1, True)
        return -loss, entropy

    return run


def _liger_flce() -> Run:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda h, w, y: (
        None,
        LigerFusedLinearCrossEntropyFunction.apply(h, w, y, None, None, -100, 0.0, 0.0, "sum")[0],
    )


def _cce() -> Run:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, y: (-linear_cross_entropy(h, w, y, reduction="none"), None)


def _quack() -> Run:
    import logging

    # quack hashes what its epilogues refer to and refuses loggers; this is its documented hook
    logging.Logger.__quack_semantic_key__ = lambda self: self.name
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def run(h, w, y):
        chunk = 4096 if h.shape[-1] != 4096 else 2048  # 0.6.5 refuses a chunk as long as the hidden size
        return None, chunked_linear_cross_entropy(h, w, y, chunk_size=chunk, reduction="sum", tuned=False)

    return run


ALL = 1 << 40
PROVIDERS = [
    Provider("ours", _ours()),
    Provider("ours, workspace 280 MiB", _ours(workspace_bytes=280 << 20)),
    Provider("ours, all kept", _ours(logits_budget_bytes=ALL), floor="6NHV"),
    Provider("ours, loss folded in", _ours_folded, scalar=True, floor="6NHV", own_backward=True),
    Provider("ours, plain Triton", _ours(), around=_gluon_disabled),
    Provider("eager", lambda: eager, floor="6NHV"),
    Provider("torch.compile", _compiled, floor="6NHV"),
    Provider("verl Triton", _verl, distribution="verl"),
    Provider("Liger sm_90", _liger, distribution="liger-kernel"),
    Provider(
        "Liger FLCE",
        _liger_flce,
        entropy=False,
        scalar=True,
        floor="6NHV",
        distribution="liger-kernel",
        own_backward=True,
    ),
    Provider("cut-cross-entropy", _cce, entropy=False, distribution="cut-cross-entropy"),
    Provider(
        "quack", _quack, entropy=False, scalar=True, floor="6NHV", distribution="quack-kernels", own_backward=True
    ),
]
