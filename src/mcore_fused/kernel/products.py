"""Matrix products of the backward, with fp32 accumulation over chunks where the library offers it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

__all__ = ["accumulate_product", "product", "product_into"]


@functools.cache
def _has_out_dtype() -> bool:
    return TorchVersion(torch.__version__) >= "2.8"


def product(a: Tensor, b: Tensor, *, wide: bool) -> Tensor:
    """``a @ b``; ``wide`` gives fp32 from half precision inputs without rounding the result first."""
    if not wide or a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda and _has_out_dtype():
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float() if a.is_cuda else torch.mm(a.float(), b.float())


def accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` in place; without an intermediate rounding if ``total`` is fp32 and the operands are half."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if total.dtype == torch.float32 and a.is_cuda and _has_out_dtype():
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(product(a, b, wide=True))


def product_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """``out = a @ b``, or ``out += a @ b``; ``out`` has any floating dtype."""
    if add:
        accumulate_product(out, a, b)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda and _has_out_dtype():
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(product(a, b, wide=True))
