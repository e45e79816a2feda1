"""The two ways from a packed call to log-probs and entropy: the fused head, and stock logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from mcore_fused.errors import FusionDidNotRunError, UnsupportedConfigError, qualified_name
from mcore_fused.head.supported import get_head
from mcore_fused.head.tensor_parallel import tensor_parallel_group
from mcore_fused.model.instance import get_lock, replaced
from mcore_fused.model.unwrap import unwrap_model
from mcore_fused.outputs import FusedForwardOutput
from mcore_fused.packing import IGNORE_INDEX
from mcore_fused.patch import ModeRequest, call_fused_forward, fused_forward

__all__ = ["FusedHead", "Head", "StockHead"]


class Head(Protocol):
    """Runs a packed call to its end."""

    def __call__(
        self, model: nn.Module, keywords: Mapping[str, Any], labels: torch.Tensor, temperature: float | torch.Tensor
    ) -> FusedForwardOutput:
        """Return log-probs and entropy ``[1, local_tokens]``, at least fp32; 0 at ignored labels."""


class FusedHead:
    """Patch, call, always restore; a model that was patched before stays patched."""

    def __init__(self, mode: ModeRequest = "auto") -> None:
        self.mode = mode

    def __call__(
        self, model: nn.Module, keywords: Mapping[str, Any], labels: torch.Tensor, temperature: float | torch.Tensor
    ) -> FusedForwardOutput:
        """See :class:`Head`; raises what :func:`call_fused_forward` raises."""
        with fused_forward(model, self.mode):
            result = _first(call_fused_forward(model, temperature=temperature, labels=labels, **keywords))
        if not isinstance(result, FusedForwardOutput):
            raise FusionDidNotRunError(
                f"{qualified_name(model)} returned a {qualified_name(result)} instead of the fused output.",
                "an outer model that rewrites its language model's result cannot be called fused.",
            )
        return result


class StockHead:
    """Stock logits, then log-softmax; holds ``[tokens, vocabulary]``. For parity, and for models that cannot fuse."""

    def __call__(
        self, model: nn.Module, keywords: Mapping[str, Any], labels: torch.Tensor, temperature: float | torch.Tensor
    ) -> FusedForwardOutput:
        """See :class:`Head`; the model is called without labels, except where MTP wants them for a loss of its own.

        Raises:
            UnsupportedConfigError: a model with MTP inside an outer model that makes labels of its own.
        """
        inner: Any = unwrap_model(model)
        if getattr(inner.config, "mtp_num_layers", None):
            logits = _whole_vocabulary(_logits_beside_mtp(model, inner, keywords, labels), inner)
        else:
            logits = _whole_vocabulary(_first(model(**keywords)), inner)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = logits / (temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)
        log_probs = torch.log_softmax(scaled, dim=-1)
        ignored = labels == IGNORE_INDEX
        chosen = log_probs.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
        # A column at -inf has probability 0 and adds nothing; 0 times -inf would be NaN.
        entropy = -torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs).sum(dim=-1)
        return FusedForwardOutput(chosen.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0))


def _first(result: Any) -> Any:
    """Outer models return their language model's result alone or first in a tuple."""
    return result[0] if isinstance(result, tuple | list) else result


def _logits_beside_mtp(
    model: nn.Module, inner: nn.Module, keywords: Mapping[str, Any], labels: torch.Tensor
) -> torch.Tensor:
    """Stock logits ``[batch, seq, vocabulary shard]`` of a call in which MTP computes its loss.

    Without labels releases to 0.16 fail in MTP, 0.17 and 0.18 leave its loss out, and 0.19 makes labels from the ids,
    whatever the caller masked. With labels the model returns its loss instead of logits; so for the one call, on this
    instance, its loss method returns the logits that it is given for these labels.
    """
    with get_lock(inner):
        reading = _LogitsForLoss(inner, labels)
        with replaced(inner, "compute_language_model_loss", reading):
            result: torch.Tensor = _first(model(labels=labels, **keywords))
    if not reading.was_asked:
        raise UnsupportedConfigError(
            f"{qualified_name(model)} calls its {qualified_name(inner)} with labels of its own, and MTP is on.",
            "run this model fused, or without MTP.",
        )
    return result


class _LogitsForLoss:
    """A loss method that gives logits for the caller's own labels, and the model's loss for any others."""

    def __init__(self, model: Any, labels: torch.Tensor) -> None:
        self.stock = model.compute_language_model_loss
        self.labels = labels
        self.was_asked = False

    def __call__(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` come as ``[seq, batch, vocabulary shard]`` and leave as the model returns them without labels."""
        if labels is not self.labels:
            loss: torch.Tensor = self.stock(labels, logits)
            return loss
        self.was_asked = True
        return logits.transpose(0, 1).contiguous()


def _whole_vocabulary(logits: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Gather vocabulary-sharded logits; a layer that gathers its own output is left alone."""
    layer: Any = get_head(model)
    group = tensor_parallel_group(layer)
    if group is None or logits.shape[-1] == layer.output_size:
        return logits
    return _GatherVocabulary.apply(logits, group)  # type: ignore[no-untyped-call,no-any-return]


class _GatherVocabulary(torch.autograd.Function):
    """Concatenate shards of the last dimension; every rank computes the same loss, so each keeps its own slice."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """Gather over ``group`` in rank order."""
        ctx.rank, ctx.width = group.rank(), shard.shape[-1]
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(shards, shard.contiguous(), group=group)
        return torch.cat(shards, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """This rank's slice of the gradient."""
        return gradients[0].narrow(-1, ctx.rank * ctx.width, ctx.width), None
