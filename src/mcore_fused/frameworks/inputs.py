"""What a forward function must know of a model before it calls it: stage, groups, alignment, keywords."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mcore_fused.errors import (
    CallArgumentError,
    CallTypeError,
    UnsupportedConfigError,
    UnsupportedModelError,
    qualified_name,
)
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
]

# Keys that data loaders put among the multi-modal inputs for their own bookkeeping; no model reads them.
_NOT_MODEL_INPUTS = frozenset({"images_seqlens"})
# Vision-language models that put image embeddings in place of their marks and pack nothing: packed ids are theirs.
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
    """Refuse to hand a padded batch to a model that would take it for a packed one.

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

    The outermost object that either names it or has no ``**kwargs`` decides; wrappers that hand everything on
    say nothing.
    """
    for module in (*chain.wrappers, chain.model):
        parameters = inspect.signature(module.forward).parameters
        if keyword in parameters:
            return True
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return True


def checked_keywords(chain: WrapperChain, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords to call with: None where the model does not know the name is left out, a value is refused.

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
    """Multi-modal inputs (pixel values, grids …) on the model's device; book-keeping entries left out."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (multi_modal_inputs or {}).items()
        if name not in _NOT_MODEL_INPUTS
    }


def position_ids_for(stage: Stage, layout: PackingLayout, given: torch.Tensor | None = None) -> torch.Tensor:
    """Packed position ids.

    Args:
        stage: the model chunk.
        layout: the packed batch.
        given: in the batch's container, or with axes in front (``[3, rows, width]`` of multi-axis rope); None
            counts inside each row.

    Returns:
        ``[1, local_tokens]``, or ``[axes, 1, local_tokens]`` for multi-axis rope.
    """
    if given is not None and not given.is_nested and given.dim() == 3:
        return torch.stack([layout.pack(axis, what="position_ids") for axis in given])
    packed = layout.position_ids if given is None else layout.pack(given, what="position_ids")
    if getattr(stage.chain.model, "position_embedding_type", None) == "mrope":
        return packed.expand(3, *packed.shape)
    return packed


def padded_rows(
    layout: PackingLayout, input_ids: torch.Tensor, pad_token_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged batch as right-padded ids and mask ``[rows, width]``, as vision-language models take it.

    Such models merge image tokens first and pack afterwards; the width suits the model's own sequence split.

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
