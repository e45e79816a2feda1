"""What packing needs from Megatron: its packed-sequence container and its parallel state. Imported lazily."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mcore_fused.errors import PackingError, UnsupportedConfigError
from mcore_fused.packing.layout import PackingLayout

__all__ = ["ParallelGroups", "layout_of", "packed_seq_params", "parallel_groups"]

_LAYOUT_ATTRIBUTE = "mcore_fused_layout"
# Newest name first; both take group_size= and know the data-parallel x context-parallel ranks.
_DYNAMIC_GROUP_LOOKUPS = ("get_dynamic_data_context_parallel_groups", "get_hybrid_data_context_parallel_groups")


@dataclass(frozen=True)
class ParallelGroups:
    """The ranks one micro-batch is split over.

    Attributes:
        cp_size: context-parallel ranks.
        cp_rank: this one.
        cp_group: their group; None with one rank.
        tp_size: tensor-parallel ranks.
        local_cp_size: set if the group was chosen for this micro-batch (dynamic context parallelism).
        tp_rank: this rank among the tensor-parallel ranks.
    """

    cp_size: int = 1
    cp_rank: int = 0
    cp_group: torch.distributed.ProcessGroup | None = None
    tp_size: int = 1
    local_cp_size: int | None = None
    tp_rank: int = 0


def parallel_groups(local_cp_size: int | None = None, collection: object | None = None) -> ParallelGroups:
    """Return the process groups of a micro-batch.

    Args:
        local_cp_size: context-parallel size of this micro-batch alone, None for the static one.
        collection: a model's own process groups (``pg_collection`` since megatron-core 0.15,
            ``model_comm_pgs`` in 0.14); what it does not name comes from the global parallel state.

    Raises:
        UnsupportedConfigError: a dynamic size, and this release has no dynamic groups.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return _single_process(local_cp_size)
    from megatron.core import parallel_state

    tp_group = getattr(collection, "tp", None)
    if tp_group is None:
        tp_group = parallel_state.get_tensor_model_parallel_group()
    if local_cp_size is None:
        cp_group = getattr(collection, "cp", None)
        if cp_group is None:
            cp_group = parallel_state.get_context_parallel_group()
    else:
        cp_group = _dynamic_group(parallel_state, local_cp_size)
    cp_rank = torch.distributed.get_rank(group=cp_group)
    return ParallelGroups(cp_group.size(), cp_rank, cp_group, tp_group.size(), local_cp_size, tp_group.rank())


def _single_process(local_cp_size: int | None) -> ParallelGroups:
    if local_cp_size not in (None, 1):
        raise PackingError(
            f"local_cp_size is {local_cp_size} without torch.distributed.", "initialise the process groups first."
        )
    return ParallelGroups(local_cp_size=local_cp_size)


def _dynamic_group(parallel_state: Any, size: int) -> torch.distributed.ProcessGroup:
    for name in _DYNAMIC_GROUP_LOOKUPS:
        lookup = getattr(parallel_state, name, None)
        if lookup is not None:
            group: torch.distributed.ProcessGroup = lookup(group_size=size)
            return group
    raise UnsupportedConfigError(
        f"local_cp_size={size} asks for dynamic context-parallel groups, which this release does not have.",
        "leave local_cp_size out, or use megatron-core 0.16 or newer.",
    )


def packed_seq_params(
    layout: PackingLayout,
    groups: ParallelGroups | None = None,
    boundaries: Literal["padded", "real"] = "padded",
) -> Any:
    """Return Megatron's ``PackedSeqParams`` of a layout, with the fields that the installed release has.

    The layout is attached to it: :func:`layout_of` returns it, so that packing and unpacking cannot disagree.

    Args:
        layout: the packed batch.
        groups: the ranks over which it is split; needed for dynamic context parallelism.
        boundaries: what attention takes as rows. ``padded`` (as verl does) is right in every release: padding
            follows its row's tokens, which causal attention never lets look ahead, and MLA (to 0.14) and the
            label roll of MTP (0.16 to 0.19) cut the physical buffer by ``cu_seqlens_q``. ``real`` gives
            kernels that know padding between rows the real lengths in ``cu_seqlens_q`` and saves the
            attention of padding. ``cu_seqlens_q_padded`` holds the physical boundaries in both.

    Returns:
        A ``megatron.core.packed_seq_params.PackedSeqParams``.

    Raises:
        UnsupportedConfigError: the layout needs a field that this release does not have: the contiguous
            layout over several ranks (``cp_partition_mode``), or dynamic context parallelism.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    rows = layout.cu_seqlens if boundaries == "real" else layout.cu_seqlens_padded
    values: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": rows,
        "cu_seqlens_kv": rows,
        "cu_seqlens_q_padded": layout.cu_seqlens_padded,
        "cu_seqlens_kv_padded": layout.cu_seqlens_padded,
        "max_seqlen_q": layout.max_seqlen,
        "max_seqlen_kv": layout.max_seqlen,
    }
    # Without total_tokens the Mamba layers of 0.17 and newer read a packed batch as one row.
    optional = {
        "cp_partition_mode": layout.settings.cp_layout,
        "total_tokens": layout.total_tokens,
        "pad_between_seqs": boundaries == "real" and layout.tokens < layout.total_tokens,
    }
    values |= {name: value for name, value in optional.items() if name in known}
    if layout.settings.cp_layout == "contiguous" and layout.settings.cp_size > 1:
        _require(known, "cp_partition_mode", "the contiguous context-parallel layout", "use the zigzag layout")
    if groups is not None and groups.local_cp_size is not None:
        for name in ("local_cp_size", "cp_group"):
            _require(known, name, "dynamic context parallelism", "leave local_cp_size out")
        values |= {"local_cp_size": groups.local_cp_size, "cp_group": groups.cp_group}
    params = PackedSeqParams(**values)
    setattr(params, _LAYOUT_ATTRIBUTE, layout)
    return params


def layout_of(params: object) -> PackingLayout:
    """Return the layout that :func:`packed_seq_params` was given.

    Raises:
        PackingError: the object was not made by this package, so its packing is unknown.
    """
    layout = getattr(params, _LAYOUT_ATTRIBUTE, None)
    if not isinstance(layout, PackingLayout):
        raise PackingError(
            "these packed_seq_params carry no packing layout.",
            "use the ones that preprocess_packed_seqs or preprocess_thd_engine of this package returned.",
        )
    return layout


def _require(known: set[str], name: str, feature: str, otherwise: str) -> None:
    if name not in known:
        raise UnsupportedConfigError(
            f"{feature} needs PackedSeqParams.{name}, which this release does not have.",
            f"use a newer megatron-core, or {otherwise}.",
        )
