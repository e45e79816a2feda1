"""Forward functions for RL frameworks: a micro-batch in, log-probs and entropy in the same container out.

Names and signatures are verl's (``verl.models.mcore``), so that a framework can switch by changing an import. The
unfused counterparts take the same arguments and compute the same result from stock logits.
Differences to verl 0.9.1: labels past the end of a row are ignored (log-prob and entropy 0) instead of wrapping
around; positions masked by ``labels_mask`` have entropy 0 too; position ids are packed with the tokens; MoE routers do
not see padding; inputs that the model cannot take are refused instead of dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from mcore_fused.frameworks.heads import FusedHead, Head, StockHead
from mcore_fused.frameworks.inputs import (
    Stage,
    accepts,
    check_packs_by_itself,
    checked_keywords,
    multi_modal_keywords,
    padded_rows,
    position_ids_for,
    read_stage,
    router_mask,
)
from mcore_fused.packing import IGNORE_INDEX, ContextParallelLayout, PackingLayout, packed_seq_params
from mcore_fused.patch import ModeRequest

__all__ = [
    "NoPaddingForward",
    "PaddedForward",
    "forward_model_gen",
    "forward_no_padding_gen",
    "fused_forward_model_engine",
    "fused_forward_model_gen",
    "fused_forward_no_padding_gen",
]

Temperature = float | torch.Tensor
Outputs = dict[str, torch.Tensor]


class PaddedForward(Protocol):
    """Forward of a padded micro-batch."""

    def __call__(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        labels_mask: torch.Tensor,
        temperature: Temperature,
        multi_modal_inputs: Mapping[str, Any] | None,
    ) -> Outputs | torch.Tensor:
        """Pack, run, unpack.

        Args:
            model: one chunk, as the framework holds it.
            input_ids: ``[rows, width]``.
            position_ids: ``[rows, width]`` or ``[axes, rows, width]``; None counts inside each row. Not used by
                vision models, which make their own.
            attention_mask: ``[rows, width]``, True at real tokens; padding may lie anywhere.
            labels: ``[rows, width]``, already shifted: the label of a slot is the next token.
            labels_mask: ``[rows, width]``, False where a label does not count.
            temperature: float above 0, ``[rows]``, or ``[rows, width]``.
            multi_modal_inputs: keywords for the model (pixel values, grids …), or nothing.

        Returns:
            ``{"log_probs", "entropy"}``, each ``[rows, width]`` fp32 and 0 outside counted labels; the model's
            own hidden states on a pipeline stage without a head.

        Raises:
            PackingError: the tensors do not describe one batch.
            CallTypeError: the model cannot take one of the inputs.
            McoreFusedError: see :func:`mcore_fused.patch_fused_forward` and :func:`mcore_fused.call_fused_forward`.
        """


class NoPaddingForward(Protocol):
    """Forward of a jagged micro-batch."""

    def __call__(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        multi_modal_inputs: Mapping[str, Any] | None,
        temperature: Temperature,
        calculate_entropy: bool,
        pad_token_id: int | None,
        cp_layout: ContextParallelLayout = "zigzag",
        local_cp_size: int | None = None,
        router_padding_mask: torch.Tensor | None = None,
        pad_to_length_bucket: int | None = None,
    ) -> Outputs | torch.Tensor:
        """Pack, run, unpack.

        Args:
            model: one chunk, as the framework holds it.
            input_ids: jagged ``[rows, ragged]``.
            labels: jagged with the same rows, not shifted (usually a clone of ``input_ids``): each slot gets the
                next label of its own row, the last slot of a row none.
            multi_modal_inputs: keywords for the model, or nothing.
            temperature: float above 0, ``[rows]``, or jagged with one value for each token.
            calculate_entropy: whether the result holds the entropy.
            pad_token_id: fills right-padded ids of vision models; others pad with token 0.
            cp_layout: how rows are split over context-parallel ranks.
            local_cp_size: context-parallel size of this micro-batch alone.
            router_padding_mask: packed ``[1, local_tokens]`` bool, True at slots that a MoE router leaves out;
                passed to the model as ``padding_mask`` (megatron-core 0.16 and newer). By default the slots
                that hold no token, if the model takes the mask.
            pad_to_length_bucket: multiple of the global padded length.

        Returns:
            ``{"log_probs"}`` and, if asked, ``"entropy"``: jagged with the offsets of ``input_ids``, fp32; the
            model's own hidden states on a pipeline stage without a head.

        Raises:
            PackingError: the tensors do not describe one batch.
            CallTypeError: the model cannot take one of the inputs.
            UnsupportedConfigError: the release cannot carry the layout.
            McoreFusedError: see :func:`mcore_fused.patch_fused_forward` and :func:`mcore_fused.call_fused_forward`.
        """


def fused_forward_model_gen(vision_model: bool = False, mode: ModeRequest = "auto") -> PaddedForward:
    """Fused forward for padded micro-batches.

    Args:
        vision_model: the model takes padded ids and its mask, merges its images and packs by itself.
        mode: see :func:`mcore_fused.patch_fused_forward`.
    """
    return _padded(FusedHead(mode), vision_model)


def forward_model_gen(vision_model: bool = False) -> PaddedForward:
    """Unfused counterpart of :func:`fused_forward_model_gen`, MTP's loss included; holds the logits."""
    return _padded(StockHead(), vision_model)


def fused_forward_no_padding_gen(vision_model: bool = False, mode: ModeRequest = "auto") -> NoPaddingForward:
    """Fused forward for jagged micro-batches; arguments as :func:`fused_forward_model_gen`."""
    return _no_padding(FusedHead(mode), vision_model)


def forward_no_padding_gen(vision_model: bool = False) -> NoPaddingForward:
    """Unfused counterpart of :func:`fused_forward_no_padding_gen`, MTP's loss included; holds the logits."""
    return _no_padding(StockHead(), vision_model)


#: The name under which verl's engine imports it.
fused_forward_model_engine = fused_forward_no_padding_gen


def _padded(head: Head, vision_model: bool) -> PaddedForward:
    def forward(
        model: nn.Module,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        labels_mask: torch.Tensor,
        temperature: Temperature,
        multi_modal_inputs: Mapping[str, Any] | None,
    ) -> Outputs | torch.Tensor:
        stage = read_stage(model)
        layout = PackingLayout.from_mask(attention_mask, stage.settings)
        if vision_model:
            check_packs_by_itself(stage.chain)
            tokens = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": None}
        else:
            tokens = _packed_tokens(layout, input_ids, position_ids_for(stage, layout, position_ids))
        keywords = tokens | multi_modal_keywords(multi_modal_inputs, input_ids.device)
        if not vision_model:
            keywords |= router_mask(stage, layout)
        packed = layout.pack_labels(labels, shift=False, mask=labels_mask) if stage.has_head else None
        return _run(head, model, stage, layout, keywords, packed, temperature)

    return forward


def _no_padding(head: Head, vision_model: bool) -> NoPaddingForward:
    def forward(
        model: nn.Module,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        multi_modal_inputs: Mapping[str, Any] | None,
        temperature: Temperature,
        calculate_entropy: bool,
        pad_token_id: int | None,
        cp_layout: ContextParallelLayout = "zigzag",
        local_cp_size: int | None = None,
        router_padding_mask: torch.Tensor | None = None,
        pad_to_length_bucket: int | None = None,
    ) -> Outputs | torch.Tensor:
        stage = read_stage(
            model, cp_layout=cp_layout, local_cp_size=local_cp_size, pad_to_length_bucket=pad_to_length_bucket
        )
        layout = PackingLayout.from_nested(input_ids, stage.settings)
        if vision_model:
            check_packs_by_itself(stage.chain)
            ids, mask = padded_rows(layout, input_ids, pad_token_id)
            tokens = {"input_ids": ids, "attention_mask": mask, "position_ids": None}
        else:
            tokens = _packed_tokens(layout, input_ids, position_ids_for(stage, layout))
        keywords = tokens | multi_modal_keywords(multi_modal_inputs, input_ids.device)
        if router_padding_mask is not None or not vision_model:  # a vision model packs by itself, and pads by itself
            keywords |= router_mask(stage, layout, router_padding_mask)
        packed = layout.pack_labels(labels) if stage.has_head else None
        outputs = _run(head, model, stage, layout, keywords, packed, temperature)
        if not calculate_entropy and isinstance(outputs, dict):
            del outputs["entropy"]
        return outputs

    return forward


def _packed_tokens(layout: PackingLayout, input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
    # Every stage gets the packed ids: a last stage with MTP embeds them again. The rows' boundaries are the mask.
    return {"input_ids": layout.pack_ids(input_ids), "attention_mask": None, "position_ids": position_ids}


def _run(
    head: Head,
    model: nn.Module,
    stage: Stage,
    layout: PackingLayout,
    keywords: dict[str, Any],
    labels: torch.Tensor | None,
    temperature: Temperature,
) -> Outputs | torch.Tensor:
    keywords["packed_seq_params"] = packed_seq_params(layout, stage.groups)
    packed_temperature = layout.pack_temperature(temperature)
    if labels is None:
        hidden: torch.Tensor = model(**checked_keywords(stage.chain, keywords))
        return hidden
    trains_mtp = getattr(stage.chain.model.config, "mtp_num_layers", None)
    if (trains_mtp or not stage.chain.transparent) and accepts(stage.chain, "loss_mask"):
        # The MTP loss averages over its loss mask; without one, padding and ignored labels would train it.
        # An outer model that rewrites labels rewrites the mask with them: LLaVAModel does not run without.
        keywords["loss_mask"] = (labels != IGNORE_INDEX).to(torch.float32)
    output = head(model, checked_keywords(stage.chain, keywords), labels, packed_temperature)
    group = stage.groups.cp_group
    return {
        "log_probs": layout.unpack(output.log_probs, group),
        "entropy": layout.unpack(output.entropy, group),
    }
