"""One re-entrant lock a model.

A fused call installs stand-ins on the instance for its duration; another thread's forward of the same model
must not meet them. The same thread may enter again (a forward inside a forward).
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

__all__ = ["lock_of"]

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock of this instance; never stored on it, so copies and pickles do not carry it."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())
