"""Which path computes a call: decided from the device, the dtype and what can run here, never by trial on live data."""

from __future__ import annotations

import torch

from mcore_fused.errors import CallArgumentError
from mcore_fused.kernel.arguments import Call

__all__ = ["choose_path"]


def choose_path(call: Call, backend: str) -> str:
    """The path's name: "torch" or "triton".

    Raises:
        CallArgumentError: ``backend="triton"`` where Triton cannot run this call.
    """
    if backend != "triton" or call.hidden.dtype == torch.float64:
        return "torch"
    raise CallArgumentError("backend='triton' cannot run this call", "use backend='auto' or 'torch'.")
