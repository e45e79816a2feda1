"""What a device can run, read once a device: the gates of the Triton and Gluon paths."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch

from mcore_fused.kernel.schedule import Tiles

__all__ = ["DeviceTraits", "device_traits", "interpreter_requested", "tiles_for", "triton_installed"]

_BIG_SHARED_MEMORY = 150 << 10


@dataclass(frozen=True)
class DeviceTraits:
    """What the launchers need to know of a device.

    Attributes:
        programs: size of a persistent grid, one program a multiprocessor.
        capability: CUDA compute capability; (0, 0) in Triton's interpreter.
        shared_memory: bytes a program may use.
        interpreted: kernels run in Triton's CPU interpreter.
    """

    programs: int
    capability: tuple[int, int]
    shared_memory: int
    interpreted: bool

    @property
    def tma(self) -> bool:
        """Tiles may be read through tensor descriptors (the interpreter emulates them)."""
        return (self.interpreted or self.capability >= (9, 0)) and _has_tensor_descriptors()


@functools.cache
def triton_installed() -> bool:
    """Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreter_requested() -> bool:
    """``TRITON_INTERPRET=1``: Triton reads it when a kernel is defined, so set it before the first call."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


@functools.cache
def _has_tensor_descriptors() -> bool:
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


@functools.cache
def device_traits(device: torch.device) -> DeviceTraits | None:
    """The traits of a device that plain Triton can use, else None.

    Needs compute capability 8.0 (bf16 and tf32 tensor cores). The interpreter pretends to have three
    multiprocessors, so that persistent loops loop at test sizes.
    """
    if not triton_installed():
        return None
    if device.type == "cpu":
        return DeviceTraits(3, (0, 0), 0, interpreted=True) if interpreter_requested() else None
    if device.type != "cuda" or torch.version.hip is not None or interpreter_requested():
        return None
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if capability < (8, 0):
        return None
    shared = int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
    return DeviceTraits(properties.multi_processor_count, capability, shared, interpreted=False)


def tiles_for(dtype: torch.dtype, traits: DeviceTraits) -> Tiles:
    """Tile of the main kernels. 128x256x64 measured best or within noise on Hopper at every shape."""
    if traits.interpreted:
        return Tiles(16, 32, 16, 4, 1)
    if dtype == torch.float32:
        return Tiles(128, 128, 32, 8, 3 if traits.shared_memory >= _BIG_SHARED_MEMORY else 2)
    if traits.shared_memory >= _BIG_SHARED_MEMORY:
        return Tiles(128, 256, 64, 8, 3)
    return Tiles(128, 128, 32, 8, 3)
