"""Which implementation of the fused head ran: the library's own counters, by path."""

import dataclasses

import torch

from mcore_fused.kernel.launches import kernel_launches

CUDA = torch.cuda.is_available()
# What serves bf16, fp16 and fp32 on a GPU; a rehearsal has torch in its place.
GPU_PATHS = frozenset({"triton", "gluon"}) if CUDA else frozenset({"torch"})


def launches():
    """Fused forwards of this process so far, by path."""
    return dataclasses.asdict(kernel_launches())


def expected_paths(path):
    """The paths that a check may use: ``gpu`` for the GPU's kernels, ``torch`` for float64, ``any`` for both."""
    return {"gpu": GPU_PATHS, "torch": frozenset({"torch"}), "any": GPU_PATHS | {"torch"}}[path]
