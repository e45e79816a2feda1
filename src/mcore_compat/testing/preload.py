"""Imported once by the server that forks ranks, so that each rank starts in milliseconds: torch, the seam, Megatron."""

import contextlib
import importlib
import os
import sys
import warnings

from mcore_compat.testing.cpu_seam import install_cpu_seam
from mcore_compat.testing.ranks import RANK_MODULES, RANK_PATH

install_cpu_seam()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # older releases warn about optional packages when they are imported
    from mcore_compat.testing import models  # noqa: F401

    sys.path += [path for path in os.environ.get(RANK_PATH, "").split(os.pathsep) if path and path not in sys.path]
    for _name in filter(None, os.environ.get(RANK_MODULES, "").split(",")):
        with contextlib.suppress(Exception):  # the rank that needs it reports why it cannot be imported
            importlib.import_module(_name)
