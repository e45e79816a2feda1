"""Which implementation of the fused head ran: the library's own counters by path, another subject's by number."""

import dataclasses

import torch

CUDA = torch.cuda.is_available()
# What serves bf16, fp16 and fp32 on a GPU; a rehearsal has torch in its place.
GPU_PATHS = frozenset({"triton", "gluon"}) if CUDA else frozenset({"torch"})
# Another subject says how often its kernel was launched, and has no other path to tell apart.
COUNTED = "its kernel"


def launches(subject=None):
    """Fused forwards of this process so far, by path; this project's own where no subject is named."""
    if subject is not None and subject.name != "mcore_fused":
        return {COUNTED: subject.evidence()["kernel_launches"]}
    from mcore_fused.kernel.launches import kernel_launches

    return dataclasses.asdict(kernel_launches())


def expected_paths(path):
    """The paths that a check may use: ``gpu`` for the GPU's kernels, ``torch`` for float64, ``any`` for both."""
    torch_only = frozenset({"torch"})
    return {"gpu": GPU_PATHS | {COUNTED}, "torch": torch_only, "any": GPU_PATHS | torch_only | {COUNTED}}[path]
