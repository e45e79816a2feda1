"""Packing of micro-batches into THD buffers, over context-parallel, sequence-parallel and FP8 alignment."""

from mcore_fused.packing.layout import IGNORE_INDEX, PackingLayout
from mcore_fused.packing.megatron import ParallelGroups, layout_of, packed_seq_params, parallel_groups
from mcore_fused.packing.settings import FP8_ROW_MULTIPLES, ContextParallelLayout, PackingSettings

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
]
