"""Imported once by the fork server, so that each rank starts in milliseconds: torch, the seam, Megatron."""

import warnings

from .cpu_seam import install_cpu_seam

install_cpu_seam()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from . import models  # noqa: F401
