"""What a forward function reads from a model before it calls it: stage, groups, alignment, keywords."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mcore_fused.errors import (
    CallArgumentError,
    CallTypeError,
    PackingError,
    UnsupportedConfigError,
    UnsupportedModelError,
    qualified_name,
)
from mcore_fused.model.signature import forward_parameters, takes_any_keyword
from mcore_fused.model.unwrap import WrapperChain, unwrap_chain
from mcore_fused.packing import (
    ContextParallelLayout,
    PackingLayout,
    PackingSettings,
    ParallelGroups,
    parallel_groups,
)

__all__ = [
    "Stage",
    "accepts",
    "check_packs_by_itself",
    "checked_keywords",
    "multi_modal_keywords",
    "padded_rows",
    "position_ids_for",
    "read_stage",
    "router_mask",
]

# Keys that data loaders add to the multi-modal inputs for their own bookkeeping; no model reads them.
_NOT_MODEL_INPUTS = frozenset({"images_seqlens"})
# Vision-language models that replace image tokens by embeddings and do not pack: they take packed ids.
_TAKES_PACKED_IDS = frozenset({"megatron.core.models.multimodal.llava_model.LLaVAModel"})


@dataclass(frozen=True, eq=False)
class Stage:
    """One model chunk as a forward function sees it.

    Attributes:
        chain: from what the caller holds to the language model.
        groups: the ranks a micro-batch is split over.
        settings: how a micro-batch is padded and split for them.
        has_head: whether this pipeline stage ends in log-probs; others return hidden states.
    """

    chain: WrapperChain
    groups: ParallelGroups
    settings: PackingSettings
    has_head: bool


def read_stage(
    model: nn.Module,
    *,
    cp_layout: ContextParallelLayout = "zigzag",
    local_cp_size: int | None = None,
    pad_to_length_bucket: int | None = None,
) -> Stage:
    """Read a chunk's stage and alignment from its language model, never from a wrapper around it.

    Raises:
        UnsupportedModelError: no language model inside.
        UnsupportedConfigError: FP4, or dynamic context parallelism in a release without it.
        PackingError: an FP8 recipe whose alignment is not known, or impossible settings.
    """
    chain = unwrap_chain(model)
    inner: Any = chain.model
    config = inner.config
    # 0.15 and newer name it pg_collection, 0.14 model_comm_pgs; before that the global state is the model's.
    collection = getattr(inner, "pg_collection", None) or getattr(inner, "model_comm_pgs", None)
    groups = parallel_groups(local_cp_size, collection)
    sparse = getattr(config, "experimental_attention_variant", None) == "dsv4_hybrid"
    settings = PackingSettings(
        cp_size=groups.cp_size,
        cp_rank=groups.cp_rank,
        tp_size=groups.tp_size,
        sequence_parallel=bool(config.sequence_parallel),
        cp_layout=cp_layout,
        fp8_recipe=_fp8_recipe(config),
        min_local_rows=config.csa_window_size if sparse else 1,
        pad_to_length_bucket=1 if pad_to_length_bucket is None else pad_to_length_bucket,
    )
    return Stage(chain, groups, settings, bool(inner.post_process))


def _fp8_recipe(config: Any) -> str | None:
    if getattr(config, "fp4", None):
        raise UnsupportedConfigError(
            f"config.fp4={config.fp4!r}: the row alignment of FP4 products is not known here.", "pack without FP4."
        )
    if not getattr(config, "fp8", None):
        return None
    recipe = getattr(config, "fp8_recipe", "delayed")
    return str(getattr(recipe, "value", recipe))


def check_packs_by_itself(chain: WrapperChain) -> None:
    """Refuse to pass a padded batch to a model that would treat it as packed.

    Raises:
        UnsupportedModelError: a wrapper of the chain is known to pack nothing.
    """
    for module in chain.wrappers:
        if any(qualified_name(kind) in _TAKES_PACKED_IDS for kind in type(module).__mro__):
            raise UnsupportedModelError(
                f"{qualified_name(module)} does not pack its batch, as models for vision_model=True do.",
                "use vision_model=False: ids are packed first, each image's mark giving one position to its embedding.",
            )


def accepts(chain: WrapperChain, keyword: str) -> bool:
    """Whether a call through the chain can take ``keyword``.

    The outermost object that either names it or has no ``**kwargs`` decides. If all have ``**kwargs``, it can.
    """
    named = _names(chain, keyword)
    return named is None or named


def _names(chain: WrapperChain, keyword: str) -> bool | None:
    """Whether some forward of the chain names ``keyword``; None if every one has ``**kwargs`` and none names it."""
    for module in (*chain.wrappers, chain.model):
        parameters = forward_parameters(module.forward)
        if keyword in parameters:
            return True
        if not takes_any_keyword(parameters):
            return False
    return None


def router_mask(stage: Stage, layout: PackingLayout, given: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return the ``padding_mask`` keyword, by which a MoE router leaves out slots that hold no token.

    The losses and the expert bias of a router count every slot otherwise. ``GPTModel`` takes the mask from
    megatron-core 0.16 on; a forward that does not name it is called without.

    Args:
        stage: the model chunk.
        layout: the packed batch.
        given: the caller's own mask, packed ``[1, local_tokens]`` bool, True at slots to leave out.

    Returns:
        The keyword with ``[1, local_tokens]``, or with this rank's slice of it where the model does not split the
        mask over sequence-parallel ranks by itself; or nothing.

    Raises:
        PackingError: the caller's mask has another shape.
    """
    if given is not None and tuple(given.shape) != (1, layout.local_tokens):
        raise PackingError(
            f"router_padding_mask is {list(given.shape)}, and this rank holds {layout.local_tokens} slots.",
            "pack it in the same way as the tokens: PackingLayout.padding_mask is such a mask.",
        )
    if given is None and not _names(stage.chain, "padding_mask"):
        return {}
    mask = layout.padding_mask if given is None else given
    model: Any = stage.chain.model
    if stage.settings.sequence_shards > 1 and not _splits_mask(model):
        mask = mask.tensor_split(stage.settings.sequence_shards, dim=1)[stage.groups.tp_rank].contiguous()
    return {"padding_mask": mask}


def _splits_mask(model: Any) -> bool:
    """Whether the model splits the mask itself: ``GPTModel`` does on its first stage, and no other model does."""
    preprocess = getattr(type(model), "_preprocess", None)
    return bool(model.pre_process) and preprocess is not None and "padding_mask" in forward_parameters(preprocess)


def checked_keywords(chain: WrapperChain, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords to call with, without those that are None and unknown to the model.

    Raises:
        CallTypeError: a value that would change the result cannot reach the model.
    """
    lost = [name for name, value in keywords.items() if value is not None and not accepts(chain, name)]
    if lost:
        raise CallTypeError(
            f"{qualified_name(chain.outer)} around {qualified_name(chain.model)} does not accept {', '.join(lost)}.",
            "leave these inputs out if they do not matter for this model, or use a model or release that takes them.",
            about_megatron=True,
        )
    return {name: value for name, value in keywords.items() if value is not None or accepts(chain, name)}


def multi_modal_keywords(multi_modal_inputs: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Return multi-modal inputs (pixel values, grids …) on the model's device, without bookkeeping entries."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (multi_modal_inputs or {}).items()
        if name not in _NOT_MODEL_INPUTS
    }


def position_ids_for(stage: Stage, layout: PackingLayout, given: torch.Tensor | None = None) -> torch.Tensor:
    """Return packed position ids.

    Args:
        stage: the model chunk.
        layout: the packed batch.
        given: in the batch's container, or with axes in front (``[3, rows, width]`` of multi-axis rope); None
            counts inside each row.

    Returns:
        ``[1, local_tokens]``, or ``[axes, 1, local_tokens]`` for multi-axis rope.

    Raises:
        PackingError: the positions do not fit the batch, or their axes cannot be distinguished from their rows.
    """
    if given is not None and not given.is_nested and given.dim() == 3:
        if given.shape[0] == given.shape[1]:
            _check_axes_come_first(layout, given)
        return torch.stack([layout.pack(axis, what="position_ids") for axis in given])
    packed = layout.position_ids if given is None else layout.pack(given, what="position_ids")
    if getattr(stage.chain.model, "position_embedding_type", None) == "mrope":
        return packed.expand(3, *packed.shape)
    return packed


def _check_axes_come_first(layout: PackingLayout, given: torch.Tensor) -> None:
    """Refuse ``[rows, axes, width]`` if there are as many rows as axes, so that the shape is ambiguous.

    Text has the same position on every axis, and every row starts and ends with text. Axes come first if that holds
    for them and images are seen in this reading; the check reads the device in this one case only.
    """
    axes_first, rows_first = _read_axes(layout, given), _read_axes(layout, given.transpose(0, 1))
    if torch.equal(axes_first, rows_first):
        return
    if _is_plausible(layout, axes_first) and not _is_plausible(layout, rows_first):
        return
    raise PackingError(
        f"position_ids are {list(given.shape)}, and their values do not say that axes come before rows.",
        "pass [axes, rows, width], or a micro-batch with another number of rows than axes.",
    )


def _read_axes(layout: PackingLayout, given: torch.Tensor) -> torch.Tensor:
    """Return ``[axes, tokens]`` of the real tokens of all rows."""
    return torch.stack([layout.container.real(layout.container.flatten(axis, "position_ids")) for axis in given])


def _is_plausible(layout: PackingLayout, axes: torch.Tensor) -> bool:
    """Whether rows start and end with text, and have something else in between."""
    text = (axes == axes[0]).all(dim=0)
    offsets = layout.container.offsets
    filled = offsets.diff() > 0
    first, last = offsets[:-1][filled], offsets[1:][filled] - 1
    return bool(text[first].all()) and bool(text[last].all()) and not bool(text.all())


def padded_rows(
    layout: PackingLayout, input_ids: torch.Tensor, pad_token_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a jagged batch as right-padded ids and mask ``[rows, width]``, the input of vision-language models.

    Such models merge image tokens first and pack afterwards; the width is divisible by the model's sequence split.

    Raises:
        CallArgumentError: no padding token was given.
    """
    if pad_token_id is None:
        raise CallArgumentError("pad_token_id is None.", "pass the tokenizer's padding token for a vision model.")
    multiple = layout.settings.row_multiple
    width = -(-max(layout.lengths) // multiple) * multiple
    flat = layout.container.flatten(input_ids, "input_ids")
    lengths = layout.container.offsets.diff()
    mask = torch.arange(width, device=flat.device) < lengths.unsqueeze(1)
    ids = flat.new_full(mask.shape, pad_token_id).masked_scatter(mask, flat)
    return ids, mask
