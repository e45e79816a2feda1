"""Replace an attribute on one instance for a while, and leave its ``vars()`` exactly as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["own_attribute", "replaced"]

_ABSENT = object()


def own_attribute(module: nn.Module, name: str) -> object | None:
    """The attribute stored on the instance itself, ignoring its class; None when there is none."""
    return vars(module).get(name)


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Store ``value`` on the instance; on exit restore what was stored there, or store nothing again.

    Works through ``__dict__`` because ``nn.Module.__setattr__`` would file modules and tensors elsewhere.
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
