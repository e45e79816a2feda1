"""Packing functions under the names that verl and other RL frameworks import; a thin layer over PackingLayout.

They read the parallel setup from Megatron's parallel state, as verl's do. Differences, all on the safe side: a rolled
tensor never contains another row's token, a roll never wraps around to the start of its row, and a result can only be
unpacked with the ``packed_seq_params`` of its own batch.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_fused.errors import PackingError
from mcore_fused.outputs import FusedForwardOutput
from mcore_fused.packing.layout import PackingLayout
from mcore_fused.packing.megatron import ParallelGroups, layout_of, packed_seq_params, parallel_groups
from mcore_fused.packing.settings import ContextParallelLayout, PackingSettings

__all__ = [
    "postprocess_packed_seqs",
    "postprocess_packed_seqs_for_dict_output",
    "postprocess_thd_engine",
    "preprocess_packed_seqs",
    "preprocess_thd_engine",
]


def _settings(
    groups: ParallelGroups,
    *,
    use_fp8_padding: bool,
    cp_layout: ContextParallelLayout = "zigzag",
    min_local_rows: int | None = None,
    pad_to_length_bucket: int | None = None,
) -> PackingSettings:
    # These signatures do not say whether the model uses sequence parallelism nor which FP8 recipe: align for
    # both, with the widest block, which the others divide.
    return PackingSettings(
        cp_size=groups.cp_size,
        cp_rank=groups.cp_rank,
        tp_size=groups.tp_size,
        sequence_parallel=groups.tp_size > 1,
        cp_layout=cp_layout,
        fp8_recipe="blockwise" if use_fp8_padding else None,
        min_local_rows=1 if min_local_rows is None else min_local_rows,
        pad_to_length_bucket=1 if pad_to_length_bucket is None else pad_to_length_bucket,
    )


def preprocess_packed_seqs(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, pre_process: bool = True, use_fp8_padding: bool = False
) -> tuple[torch.Tensor, Any]:
    """Pack a padded batch for this context-parallel rank.

    Args:
        input_ids: ``[rows, width, ...]``.
        attention_mask: ``[rows, width]``, True at real tokens.
        pre_process: False gives ``input_ids`` back unpacked (stages without an embedding).
        use_fp8_padding: align every rank's slots to 128.

    Returns:
        ``[1, local_tokens, ...]`` and Megatron's ``PackedSeqParams``.

    Raises:
        PackingError: mask and ids do not fit.
    """
    groups = parallel_groups()
    layout = PackingLayout.from_mask(attention_mask, _settings(groups, use_fp8_padding=use_fp8_padding))
    params = packed_seq_params(layout, groups)
    return (layout.pack(input_ids, what="input_ids") if pre_process else input_ids), params


def postprocess_packed_seqs(
    output: torch.Tensor,
    packed_seq_params: object,
    attention_mask: torch.Tensor,
    batch_size: int,
    seq_len: int,
    post_process: bool = True,
) -> torch.Tensor:
    """Bring a packed output ``[1, local_tokens, ...]`` back to ``[batch_size, seq_len, ...]``, 0 in padding.

    Args:
        output: this rank's slots.
        packed_seq_params: what :func:`preprocess_packed_seqs` returned for this batch.
        attention_mask: the mask it was packed with.
        batch_size: rows.
        seq_len: width.
        post_process: False gives ``output`` back (stages without a head).

    Raises:
        PackingError: the arguments describe another batch than the one that was packed.
    """
    if not post_process:
        return output
    layout = layout_of(packed_seq_params)
    container = layout.container
    if container.kind != "padded" or {(batch_size, seq_len), tuple(attention_mask.shape)} != {
        (container.rows, container.width)
    }:
        raise PackingError(
            f"the batch is said to be [{batch_size}, {seq_len}] with a mask {list(attention_mask.shape)}; "
            f"packed was [{container.rows}, {container.width}].",
            "pass the arguments that the batch was packed with.",
        )
    return layout.unpack(output, _cp_group(layout))


def postprocess_packed_seqs_for_dict_output(
    labels_mask: torch.Tensor,
    output: FusedForwardOutput,
    packed_seq_params: object,
    attention_mask: torch.Tensor,
    batch_size: int,
    seq_len: int,
    post_process: bool = True,
) -> dict[str, torch.Tensor]:
    """Unpack a fused output into ``{"log_probs", "entropy"}``; log-probs are 0 outside ``labels_mask``.

    Args:
        labels_mask: packed, ``[1, local_tokens]`` bool.
        output: with both members ``[1, local_tokens]``; left as it is.
        packed_seq_params: see :func:`postprocess_packed_seqs`, as for all that follow.
        attention_mask: the mask.
        batch_size: rows.
        seq_len: width.
        post_process: False gives the packed tensors back.
    """
    members = {
        "log_probs": output.log_probs.reshape(1, -1).masked_fill(labels_mask.logical_not(), 0.0),
        "entropy": output.entropy.reshape(1, -1),
    }
    return {
        name: postprocess_packed_seqs(member, packed_seq_params, attention_mask, batch_size, seq_len, post_process)
        for name, member in members.items()
    }


def preprocess_thd_engine(
    input_ids: torch.Tensor,
    pre_process: bool = True,
    need_roll: bool = False,
    use_fp8_padding: bool = False,
    local_cp_size: int | None = None,
    min_local_rows: int | None = None,
    pad_to_length_bucket: int | None = None,
    cp_layout: ContextParallelLayout = "zigzag",
    roll_fill: int = 0,
) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
    """Pack a jagged batch for this context-parallel rank.

    Args:
        input_ids: jagged nested tensor ``[rows, ragged, ...]``.
        pre_process: False gives ``input_ids`` back unpacked.
        need_roll: each slot gets the next element of its own row.
        use_fp8_padding: align every rank's slots to 128.
        local_cp_size: context-parallel size of this micro-batch alone.
        min_local_rows: fewest slots of a rank.
        pad_to_length_bucket: multiple of the global padded length.
        cp_layout: ``zigzag`` or ``contiguous``.
        roll_fill: what a roll puts where a row has no next element and in padding; -100 for labels, 0 for
            masks that travel with them.

    Returns:
        ``[1, local_tokens, ...]``, Megatron's ``PackedSeqParams``, and position ids ``[1, local_tokens]``
        (None without ``pre_process``).

    Raises:
        PackingError: not a jagged tensor, or impossible settings.
        UnsupportedConfigError: this release cannot carry the layout.
    """
    groups = parallel_groups(local_cp_size)
    settings = _settings(
        groups,
        use_fp8_padding=use_fp8_padding,
        cp_layout=cp_layout,
        min_local_rows=min_local_rows,
        pad_to_length_bucket=pad_to_length_bucket,
    )
    layout = PackingLayout.from_nested(input_ids, settings)
    params = packed_seq_params(layout, groups)
    if not pre_process:
        return input_ids, params, None
    if need_roll:
        return layout.pack_labels(input_ids, ignore_index=roll_fill), params, layout.position_ids
    return layout.pack(input_ids, what="input_ids"), params, layout.position_ids


def postprocess_thd_engine(
    output: torch.Tensor,
    packed_seq_params: object,
    input_ids: torch.Tensor,
    batch_size: int,
    post_process: bool = True,
    local_cp_size: int | None = None,
    cp_layout: ContextParallelLayout = "zigzag",
) -> torch.Tensor:
    """Bring a packed output back to a jagged tensor with the offsets of the packed ``input_ids``.

    Args:
        output: this rank's slots, ``[1, local_tokens, ...]``.
        packed_seq_params: what :func:`preprocess_thd_engine` returned for this batch.
        input_ids: the jagged tensor that was packed.
        batch_size: rows.
        post_process: False gives ``output`` back.
        local_cp_size: as it was packed.
        cp_layout: as it was packed.

    Raises:
        PackingError: the arguments describe another batch or another layout than the one that was packed.
    """
    if not post_process:
        return output
    layout = layout_of(packed_seq_params)
    layout.container.flatten(input_ids, "input_ids")
    cp_size = layout.settings.cp_size
    if (
        batch_size != len(layout.lengths)
        or layout.settings.cp_layout != cp_layout
        or local_cp_size not in (None, cp_size)
    ):
        raise PackingError(
            f"unpacking asks for {batch_size} rows, {cp_layout}, local_cp_size={local_cp_size}; packed were "
            f"{len(layout.lengths)} rows, {layout.settings.cp_layout}, over {cp_size} ranks.",
            "pass the arguments that the batch was packed with.",
        )
    return layout.unpack(output, _cp_group(layout, local_cp_size))


def _cp_group(layout: PackingLayout, local_cp_size: int | None = None) -> torch.distributed.ProcessGroup | None:
    return None if layout.settings.cp_size == 1 else parallel_groups(local_cp_size).cp_group
