"""What a call of the kernel may contain: checks and normal form. No arithmetic here.

Every refusal is a :class:`~mcore_fused.errors.CallArgumentError` (value, shape) or
:class:`~mcore_fused.errors.CallTypeError` (type, dtype). Values that live on an accelerator are not read by default,
because reading them stops the host until the device is idle: bad ones come out as NaN there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from mcore_fused.errors import CallArgumentError, CallTypeError

__all__ = ["BACKENDS", "FLOAT_DTYPES", "REDUCTIONS", "Call", "common_dtype", "normalise_call"]

BACKENDS = ("auto", "triton", "torch")
REDUCTIONS = ("none", "mean", "sum")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Call:
    """One checked call in normal form.

    Attributes:
        hidden: ``[N, H]`` in the common dtype; a view of the caller's where its strides allow one.
        weight: ``[V, H]`` in the common dtype.
        labels: ``[N]`` integers, contiguous.
        logit_scale: scale / temperature, a number or a fp32 (fp64 for float64 inputs) tensor ``[N]``; above 0.
        shape: the labels' shape, which the outputs get.
        ignore_index: the label that means "no token here".
        vocab_size: real rows of the *global* vocabulary, or None for all.
        logits_budget_bytes: memory that the forward may keep for the backward.
        workspace_bytes: memory that the backward may use beyond the gradients.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    logit_scale: float | Tensor
    shape: torch.Size
    ignore_index: int
    vocab_size: int | None
    logits_budget_bytes: int
    workspace_bytes: int


def common_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that the product is computed in.

    Under autocast both are cast to autocast's dtype, as ``torch.nn.functional.linear`` would do (float64 is left
    alone, as there). Otherwise torch's own promotion decides: bf16 hidden with fp32 weight is computed in fp32,
    bf16 with fp16 in fp32.
    """
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def normalise_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    *,
    ignore_index: int,
    scale: float,
    vocab_size: int | None,
    logits_budget_bytes: int,
    workspace_bytes: int,
    check_values: bool,
) -> Call:
    """Check every argument and bring the call into normal form.

    Raises:
        CallTypeError: not a tensor, a dtype that is not one of bf16, fp16, fp32, fp64 (hidden, weight) or an integer
            (labels), a temperature or scale that is not a number.
        CallArgumentError: shapes that do not fit, tensors on several devices, a temperature that is not finite and
            positive, a vocabulary size outside the weight, a negative budget.
    """
    _check_tensors(hidden, weight, labels)
    for name, count in (("logits_budget_bytes", logits_budget_bytes), ("workspace_bytes", workspace_bytes)):
        if _check_integer(name, count) < 0:
            raise CallArgumentError(f"{name} is {count}", "pass a number of bytes, at least 0.")
    if vocab_size is not None and _check_integer("vocab_size", vocab_size) < 1:
        raise CallArgumentError(f"vocab_size is {vocab_size}", "pass the number of real vocabulary rows, at least 1.")
    ignore_index = _check_integer("ignore_index", ignore_index)
    factor = _check_number("scale", scale)
    if not math.isfinite(factor):
        raise CallArgumentError(f"scale is {factor}", "pass a finite logit multiplier; 1.0 changes nothing.")
    dtype = common_dtype(hidden, weight)
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    flat_labels = labels.reshape(-1).contiguous()
    if flat_labels.dtype not in (torch.int32, torch.int64):  # so that ignore_index fits whatever it is
        flat_labels = flat_labels.to(torch.int64)
    if factor < 0:  # the running maximum is taken before the multiplication, which needs a factor >= 0
        rows, factor = -rows, -factor
    if factor == 0:  # all logits 0; as a factor it would meet the -inf of masked columns
        rows, factor = rows * 0.0, 1.0
    logit_scale = _logit_scale(temperature, factor, flat_labels, labels.shape, ignore_index, dtype, check_values)
    return Call(
        rows,
        weight.to(dtype),
        flat_labels,
        logit_scale,
        labels.shape,
        ignore_index,
        vocab_size,
        logits_budget_bytes,
        workspace_bytes,
    )


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    for name, value in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise CallTypeError(f"{name} is a {type(value).__name__}", "pass a torch.Tensor.")
    for name, value in (("hidden", hidden), ("weight", weight)):
        if value.dtype not in FLOAT_DTYPES:
            raise CallTypeError(f"{name} has dtype {value.dtype}", "pass bfloat16, float16, float32 or float64.")
    if labels.dtype not in _INTEGER_DTYPES:
        raise CallTypeError(f"labels have dtype {labels.dtype}", "pass integer token ids, int64 by preference.")
    if hidden.dim() not in (2, 3):
        raise CallArgumentError(
            f"hidden has shape {list(hidden.shape)}", "pass [tokens, hidden_size] or [a, b, hidden_size]."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise CallArgumentError(
            f"weight has shape {list(weight.shape)} and hidden {list(hidden.shape)}",
            "pass weight as [vocabulary, hidden_size], as torch.nn.Linear keeps it.",
        )
    if weight.shape[0] < 1 or weight.shape[1] < 1:
        raise CallArgumentError(f"weight has shape {list(weight.shape)}", "pass at least one row and one column.")
    if labels.shape != hidden.shape[:-1]:
        raise CallArgumentError(
            f"labels have shape {list(labels.shape)} and hidden {list(hidden.shape)}",
            "give labels the shape hidden.shape[:-1]; transpose one of them if the orders differ ([b, s] and [s, b]).",
        )
    if not hidden.device == weight.device == labels.device:
        raise CallArgumentError(
            f"hidden is on {hidden.device}, weight on {weight.device}, labels on {labels.device}",
            "move all three to one device.",
        )


def _check_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CallTypeError(f"{name} is {value!r} of type {type(value).__name__}", "pass a number.")
    return float(value)


def _check_integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CallTypeError(f"{name} is {value!r} of type {type(value).__name__}", "pass an integer.")
    return value


def _logit_scale(
    temperature: float | Tensor,
    scale: float,
    labels: Tensor,
    shape: torch.Size,
    ignore_index: int,
    dtype: torch.dtype,
    check_values: bool,
) -> float | Tensor:
    """Scale / temperature, as a number or one value a token."""
    if not isinstance(temperature, Tensor):
        number = _check_number("temperature", temperature)
        if not (math.isfinite(number) and number > 0):
            raise CallArgumentError(
                f"temperature is {number}", "pass a finite number above 0; greedy sampling has no log-prob of its own."
            )
        return scale / number
    if temperature.dtype not in FLOAT_DTYPES:
        raise CallTypeError(f"temperature has dtype {temperature.dtype}", "pass a floating-point tensor or a number.")
    if temperature.dim() != 0 and temperature.shape != shape:
        raise CallArgumentError(
            f"temperature has shape {list(temperature.shape)} and labels {list(shape)}",
            "pass one temperature a token, packed exactly as the labels are, or one number.",
        )
    if temperature.dim() == 0 and temperature.device.type == "cpu":
        return _logit_scale(float(temperature), scale, labels, shape, ignore_index, dtype, check_values)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values = temperature.detach().to(device=labels.device, dtype=exact).expand(shape).reshape(-1)
    unusable = ~(torch.isfinite(values) & (values > 0))
    ignored = labels == ignore_index
    if (check_values or labels.device.type == "cpu") and bool((unusable & ~ignored).any()):
        raise CallArgumentError(
            "temperature holds a value that is not finite and above 0 at a token that is not ignored",
            "fill padding only where labels are ignore_index, and pass positive temperatures elsewhere.",
        )
    # padding is often filled with 0, which must not become a NaN that spreads through a product
    return torch.where(unusable, torch.where(ignored, scale, torch.nan), scale / values)
