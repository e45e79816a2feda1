"""Imported once by the server that forks ranks, so that each rank starts in milliseconds: torch, the seam, Megatron."""

import warnings

from mcore_compat.testing.cpu_seam import install_cpu_seam

install_cpu_seam()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # older releases warn about optional packages when they are imported
    from mcore_compat.testing import models  # noqa: F401
