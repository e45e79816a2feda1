"""The implementation under test, which ``MCORE_COMPAT_SUBJECT`` names."""

import contextlib
import os
from typing import Any

from mcore_compat.subjects import protocol

from .own import McoreFused
from .stock import Stock


def _verl():
    from .verl import Verl

    return Verl()


_BUILT_IN = {"mcore_fused": McoreFused, "stock": Stock, "verl": _verl}


def load_subject() -> protocol.Subject:
    """The subject that the environment names."""
    return protocol.load_subject(os.environ.get(protocol.VARIABLE, protocol.DEFAULT_SUBJECT), _BUILT_IN)


@contextlib.contextmanager
def patched(subject: protocol.Subject, model: Any, mode: str = "auto"):
    """Patch for a block, and always take it back."""
    subject.patch(model, mode)
    try:
        yield model
    finally:
        subject.unpatch(model)
