"""Harness that proves a fused-forward implementation on every megatron-core."""

import sys

if sys.version_info[:2] < (3, 12):  # the runtime library mcore_fused of the same distribution runs on 3.10 and later
    raise ImportError("mcore_compat needs Python 3.12 or later; this is Python {}.{}.".format(*sys.version_info[:2]))
