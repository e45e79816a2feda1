"""A modelled future: a ``PackedSeqParams`` that says how its batch is split over the context-parallel ranks.

Upstream's dev branch has the field ``cp_partition_mode`` (NVIDIA/Megatron-LM#6387); its main branch and the releases to
0.19.2 have not, and the library refuses the contiguous layout there. With the modelled class in place of the release's
own, that layout can be proved through a real model today. A release that has the field is judged with its own class.
"""

import contextlib
import dataclasses
from dataclasses import dataclass

from megatron.core import packed_seq_params


@dataclass
class FuturePackedSeqParams(packed_seq_params.PackedSeqParams):
    """Model of the dev branch's class: the release's own fields and ``cp_partition_mode``, by default zigzag."""

    cp_partition_mode: str = "zigzag"


def release_has_partition_mode():
    """Whether the release's own class can say how a batch is split."""
    return "cp_partition_mode" in {field.name for field in dataclasses.fields(packed_seq_params.PackedSeqParams)}


@contextlib.contextmanager
def partition_mode_known():
    """For a block, the name under which the library finds the class leads to one that has the field."""
    release = packed_seq_params.PackedSeqParams
    if not release_has_partition_mode():
        packed_seq_params.PackedSeqParams = FuturePackedSeqParams
    try:
        yield
    finally:
        packed_seq_params.PackedSeqParams = release
