"""Which path computes a call: decided from the device, the dtype and what can run here, never by trial on live data."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel.devices import device_traits, triton_installed

__all__ = ["backend_module", "choose_path"]


def choose_path(hidden: Tensor, backend: str) -> str:
    """The path's name: "torch" or "triton" (which uses Gluon kernels by itself where they are proved to work).

    "auto" takes torch on a CPU also when the interpreter is on: that is for tests of the kernels, and slow.

    Raises:
        CallArgumentError: ``backend="triton"`` where Triton cannot run this call.
    """
    if backend == "torch":
        return "torch"
    obstacle = _obstacle(hidden)
    if backend == "triton":
        if obstacle is not None:
            raise CallArgumentError(f"backend='triton' cannot run here: {obstacle}.", "use backend='auto' or 'torch'.")
        return "triton"
    return "triton" if obstacle is None and hidden.is_cuda else "torch"


def _obstacle(hidden: Tensor) -> str | None:
    if hidden.dtype == torch.float64:
        return "float64 has no kernel"
    if not triton_installed():
        return "Triton is not installed"
    if device_traits(hidden.device) is None:
        if hidden.device.type == "cpu":
            return "on a CPU Triton needs its interpreter (TRITON_INTERPRET=1)"
        return f"{hidden.device} is not a CUDA device of compute capability 8.0 or newer"
    return None


def backend_module(path: str) -> ModuleType:
    """The module that computes: imported on first use, so that a host without Triton can use the other."""
    if path == "torch":
        from mcore_fused.kernel import torch_backend

        return torch_backend
    from mcore_fused.kernel import triton_backend

    return triton_backend
