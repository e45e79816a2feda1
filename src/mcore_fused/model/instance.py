"""State of one model instance: attributes replaced for the duration of a call, and one lock.

Nothing here is stored on the model permanently, so copies and pickles of a model do not carry it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from torch import nn

__all__ = ["get_lock", "own_attribute", "replaced"]

_ABSENT = object()
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def own_attribute(module: nn.Module, name: str) -> object | None:
    """Return the attribute stored on the instance itself, ignoring its class; None if there is none."""
    return vars(module).get(name)


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Store ``value`` on the instance, and restore the previous ``vars(owner)`` on exit.

    Writes to ``__dict__`` directly because ``nn.Module.__setattr__`` stores modules and tensors elsewhere.
    """
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    attributes[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = before


def get_lock(model: nn.Module) -> threading.RLock:
    """Return the re-entrant lock of this instance.

    A fused call replaces attributes of the instance for its duration, and a forward of the same model in another
    thread must not see them. The same thread may enter again (a forward inside a forward).
    """
    with _guard:
        return _locks.setdefault(model, threading.RLock())
