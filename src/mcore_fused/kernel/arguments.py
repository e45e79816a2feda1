"""What a call of the kernel may contain: checks and normal form. No arithmetic here.

Every refusal is a :class:`~mcore_fused.errors.CallArgumentError` (value, shape) or
:class:`~mcore_fused.errors.CallTypeError` (type, dtype). Values that live on an accelerator are not read by default,
because reading them stops the host until the device is idle: bad ones come out as NaN there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from mcore_fused.errors import CallArgumentError, CallTypeError
from mcore_fused.kernel.dispatch import choose_path
from mcore_fused.kernel.main_grad import MainGrad
from mcore_fused.kernel.options import BACKENDS, REDUCTIONS, KernelOptions
from mcore_fused.kernel.tensor_parallel import active_group

__all__ = ["FLOAT_DTYPES", "Call", "common_dtype", "normalise_call"]

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
        options: the options, checked and resolved (see :class:`KernelOptions`).
        main_grad: where the weight gradient goes, or None if autograd gets it.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    logit_scale: float | Tensor
    shape: torch.Size
    options: KernelOptions
    main_grad: MainGrad | None


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


def normalise_call(hidden: Tensor, weight: Tensor, labels: Tensor, options: KernelOptions) -> Call:
    """Check every argument and bring the call into normal form.

    Raises:
        CallTypeError: not a tensor, a dtype that is not one of bf16, fp16, fp32, fp64 (hidden, weight) or an integer
            (labels), a temperature or scale that is not a number, a group that is not one of torch.distributed.
        CallArgumentError: shapes that do not fit, tensors on several devices, a temperature that is not finite and
            positive, a vocabulary size outside the weight, a negative budget, an unknown backend or reduction.
    """
    factor = _check_options(options)
    group = active_group(options.tp_group)
    _check_tensors(hidden, weight, labels)
    dtype = common_dtype(hidden, weight)
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    flat_labels = labels.reshape(-1).contiguous()
    if flat_labels.dtype not in (torch.int32, torch.int64):  # so that ignore_index fits whatever it is
        flat_labels = flat_labels.to(torch.int64)
    if factor < 0:  # the running maximum is taken before the multiplication, which needs a factor >= 0
        rows, factor = -rows, -factor
    if factor == 0:  # all logits 0; as a factor it would meet the -inf of masked columns
        rows, factor = rows * 0.0, 1.0
    logit_scale = _logit_scale(options, factor, flat_labels, labels.shape, dtype)
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    resolved = replace(
        options,
        tp_group=group,
        backend=choose_path(rows, options.backend),
        logits_budget_bytes=options.logits_budget_bytes if differentiable else 0,
    )
    # taken from the caller's own tensor: a cast copy has no attributes
    main_grad = MainGrad(weight) if options.gradient_accumulation_fusion and weight.requires_grad else None
    return Call(rows, weight.to(dtype), flat_labels, logit_scale, labels.shape, resolved, main_grad)


def _check_options(options: KernelOptions) -> float:
    """Refuse impossible options; returns the logit multiplier as a number."""
    if options.backend not in BACKENDS:
        raise CallArgumentError(f"backend is {options.backend!r}.", f"choose one of {', '.join(BACKENDS)}.")
    if options.reduction not in REDUCTIONS:
        raise CallArgumentError(f"reduction is {options.reduction!r}.", f"choose one of {', '.join(REDUCTIONS)}.")
    for name in ("logits_budget_bytes", "workspace_bytes"):
        count = _check_integer(name, getattr(options, name))
        if count < 0:
            raise CallArgumentError(f"{name} is {count}.", "pass a number of bytes, at least 0.")
    if options.vocab_size is not None and _check_integer("vocab_size", options.vocab_size) < 1:
        raise CallArgumentError(
            f"vocab_size is {options.vocab_size}.", "pass the number of real vocabulary rows, at least 1."
        )
    if options.counted_rows is not None and _check_integer("counted_rows", options.counted_rows) < 0:
        raise CallArgumentError(
            f"counted_rows is {options.counted_rows}.", "pass an upper bound of the labels that count, or None."
        )
    _check_integer("ignore_index", options.ignore_index)
    factor = _check_number("scale", options.scale)
    if not math.isfinite(factor):
        raise CallArgumentError(f"scale is {factor}.", "pass a finite logit multiplier; 1.0 changes nothing.")
    return factor


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
    options: KernelOptions, scale: float, labels: Tensor, shape: torch.Size, dtype: torch.dtype
) -> float | Tensor:
    """Scale / temperature, as a number or one value per token."""
    temperature = options.temperature
    if isinstance(temperature, Tensor) and temperature.dim() == 0 and temperature.device.type == "cpu":
        if temperature.dtype not in FLOAT_DTYPES:
            raise _temperature_dtype(temperature)
        temperature = float(temperature)
    if not isinstance(temperature, Tensor):
        number = _check_number("temperature", temperature)
        if not (math.isfinite(number) and number > 0):
            raise CallArgumentError(
                f"temperature is {number}", "pass a finite number above 0; greedy sampling has no log-prob of its own."
            )
        return scale / number
    if temperature.dtype not in FLOAT_DTYPES:
        raise _temperature_dtype(temperature)
    if temperature.dim() != 0 and temperature.shape != shape:
        raise CallArgumentError(
            f"temperature has shape {list(temperature.shape)} and labels {list(shape)}",
            "pass one temperature per token, packed exactly as the labels are, or one number.",
        )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values = temperature.detach().to(device=labels.device, dtype=exact).expand(shape).reshape(-1)
    unusable = ~(torch.isfinite(values) & (values > 0))
    ignored = labels == options.ignore_index
    if (options.check_labels or labels.device.type == "cpu") and bool((unusable & ~ignored).any()):
        raise CallArgumentError(
            "temperature holds a value that is not finite and above 0 at a token that is not ignored",
            "fill padding only where labels are ignore_index, and pass positive temperatures elsewhere.",
        )
    # padding is often filled with 0, which must not become a NaN that spreads through a product
    return torch.where(unusable, torch.where(ignored, scale, torch.nan), scale / values)


def _temperature_dtype(temperature: Tensor) -> CallTypeError:
    return CallTypeError(f"temperature has dtype {temperature.dtype}.", "pass a floating-point tensor or a number.")
