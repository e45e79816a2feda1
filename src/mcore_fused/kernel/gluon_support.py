"""Whether the Gluon kernels are used: decided once per device and dtype, with the reason.

Three conditions: compute capability 9.0 exactly (they use instructions of Hopper), a Triton release whose Gluon they
were tested on (it is an experimental interface), and a self-test against torch on the device itself. If one of them
fails the plain Triton kernels run instead, with the same results. ``MCORE_FUSED_GLUON=0`` disables them by hand.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor

from mcore_fused.kernel.devices import DeviceTraits, device_traits
from mcore_fused.kernel.problem import ieee_fp32_products
from mcore_fused.kernel.schedule import Split

__all__ = ["GluonSupport", "gluon_enabled", "gluon_support"]

TESTED_TRITON = ("3.6",)
_HALF = (torch.bfloat16, torch.float16)
_lock = threading.Lock()
_states: dict[tuple[torch.device, torch.dtype], GluonSupport] = {}


@dataclass(frozen=True)
class GluonSupport:
    """Whether the Gluon kernels are used, and why."""

    enabled: bool
    reason: str


def gluon_enabled(device: torch.device, dtype: torch.dtype) -> bool:
    """The Gluon kernels may be used for this device and dtype. Runs the self-test on the first question."""
    return gluon_support(device, dtype).enabled


def gluon_support(device: torch.device, dtype: torch.dtype) -> GluonSupport:
    """Whether they are used, and why. The first call on a Hopper device compiles and runs the kernels, about 10 s.

    During CUDA-graph capture nothing can be tested: undecided support counts as disabled for that call only.
    """
    state = _states.get((device, dtype))
    if state is not None:
        return state
    obstacle = _static_obstacle(device_traits(device), dtype)
    if obstacle is None and torch.cuda.is_current_stream_capturing():
        return GluonSupport(enabled=False, reason="undecided: no self-test during CUDA-graph capture")
    with _lock:
        if (device, dtype) not in _states:
            _states[device, dtype] = (
                GluonSupport(enabled=False, reason=obstacle) if obstacle else _tested(device, dtype)
            )
        return _states[device, dtype]


def _static_obstacle(traits: DeviceTraits | None, dtype: torch.dtype) -> str | None:
    if os.environ.get("MCORE_FUSED_GLUON", "1") == "0":
        return "MCORE_FUSED_GLUON=0"
    if traits is None or traits.interpreted or traits.capability != (9, 0):
        return "not a GPU of compute capability 9.0"
    if dtype not in _HALF:
        return f"{dtype} is not bf16 or fp16"
    version = metadata.version("triton")
    if ".".join(version.split(".")[:2]) not in TESTED_TRITON:
        return f"Triton {version}: tested on {', '.join(TESTED_TRITON)}"
    return None


def _tested(device: torch.device, dtype: torch.dtype) -> GluonSupport:
    try:
        problem = _self_test(device, dtype)
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises: reported, and the plain kernels serve)
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return GluonSupport(enabled=True, reason="self-test passed")
    warnings.warn(
        f"mcore_fused: the Gluon kernels failed their self-test on {device} ({problem}); plain Triton is used.",
        RuntimeWarning,
        stacklevel=2,
    )
    return GluonSupport(enabled=False, reason=f"self-test failed: {problem}")


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Both kernels on a problem with ragged edges in every dimension; None if they agree with torch."""
    from mcore_fused.kernel import hopper

    tokens, width, rows, real, first = 200, 136, 1024, 1000, 256
    make = torch.Generator(device="cpu").manual_seed(0)
    with torch.cuda.device(device), torch.no_grad(), ieee_fp32_products():
        hidden = torch.randn(tokens, width, generator=make).to(device, dtype)
        weight = (torch.randn(rows, width, generator=make) / 8).to(device, dtype)
        scale = torch.rand(tokens, generator=make).to(device) + 0.5
        coefficients = torch.randn(4, tokens, generator=make).to(device)
        x = (hidden.float() @ weight[:real].float().T) * scale[:, None]
        statistics = torch.full((3, 3, tokens), torch.nan, device=device)
        kept = torch.full((tokens, 512), torch.nan, device=device, dtype=dtype)
        base = torch.full((2, tokens), torch.nan, device=device)
        programs = 3  # fewer than units: the persistent loops must loop
        hopper.statistics(hidden, weight, scale, 1.0, statistics, real, (kept, base), Split(2, 1), programs)
        top, total, moment = statistics.unbind(1)
        lse = torch.logsumexp((top + torch.log2(total)) * 0.6931471805599453, 0) / 0.6931471805599453
        expected = torch.logsumexp(x * 0.6931471805599453, 1) / 0.6931471805599453
        if not _close(lse, expected, 1e-3):
            return "log-sum-exp"
        if not bool(torch.isfinite(moment).all()):
            return "moment"
        if not _close(kept.float(), torch.exp2(x[:, :512] - base.repeat_interleave(256, 0).T), 2e-2):
            return "kept exponentials"
        coefficients[0] = expected
        out = torch.full((tokens, 744), torch.nan, device=device, dtype=dtype)
        hopper.dlogits(hidden, weight, scale, 1.0, coefficients, out, first, programs)
        lp = x[:, first:real] - expected[:, None]
        wanted = torch.exp2(lp) * (coefficients[1][:, None] + coefficients[2][:, None] * lp)
        return None if _close(out.float(), wanted, 2e-2) else "dlogits"


def _close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got - expected).norm() <= tolerance * expected.norm())
