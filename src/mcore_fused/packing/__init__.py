"""Packing of micro-batches into THD buffers, over context-parallel, sequence-parallel and FP8 alignment."""

from mcore_fused.packing.layout import IGNORE_INDEX, PackingLayout
from mcore_fused.packing.megatron import ParallelGroups, layout_of, packed_seq_params, parallel_groups
from mcore_fused.packing.settings import FP8_ROW_MULTIPLES, ContextParallelLayout, PackingSettings
from mcore_fused.packing.verl_packing import (
    postprocess_packed_seqs,
    postprocess_packed_seqs_for_dict_output,
    postprocess_thd_engine,
    preprocess_packed_seqs,
    preprocess_thd_engine,
)

__all__ = [
    "FP8_ROW_MULTIPLES",
    "IGNORE_INDEX",
    "ContextParallelLayout",
    "PackingLayout",
    "PackingSettings",
    "ParallelGroups",
    "layout_of",
    "packed_seq_params",
    "parallel_groups",
    "postprocess_packed_seqs",
    "postprocess_packed_seqs_for_dict_output",
    "postprocess_thd_engine",
    "preprocess_packed_seqs",
    "preprocess_thd_engine",
]
