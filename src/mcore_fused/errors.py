"""Typed errors of mcore_fused: each names the object, the version it was met on, and the next step.

A caller catches :class:`MCoreFusedError` for all of them. Argument errors are also ``ValueError`` or
``TypeError``, so that code which knows nothing of this package still sees what it expects.
"""

from __future__ import annotations

import functools
from importlib import metadata

__all__ = [
    "CallArgumentError",
    "CallTypeError",
    "DeferredLogitsError",
    "ForeignPatchError",
    "FusionDidNotRunError",
    "MCoreFusedError",
    "ModeError",
    "PackingError",
    "PatchOrderError",
    "RegistryError",
    "UnsupportedConfigError",
    "UnsupportedModelError",
    "UnsupportedOutputLayerError",
]


@functools.cache
def megatron_version() -> str:
    """The installed megatron-core as a label for messages; never used to decide behaviour."""
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "megatron-core (no distribution metadata)"


def qualified_name(thing: object) -> str:
    """``module.QualName`` of a class, function or of an instance's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', repr(named))}"


def _sentence(text: str) -> str:
    """The text without blanks around it, with a full stop unless it ends in a mark of its own."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


class MCoreFusedError(Exception):
    """Root of this package's errors: one sentence about the problem, then one about what to do.

    Both sentences end in a full stop, which is added if a caller left it out.

    Attributes:
        problem: what was met, naming the object.
        next_step: what the caller can do about it.
        version: the installed megatron-core as a label, or None if Megatron plays no part.
    """

    def __init__(self, problem: str, next_step: str, *, about_megatron: bool = True) -> None:
        self.problem = _sentence(problem)
        self.next_step = _sentence(next_step)
        self.version = megatron_version() if about_megatron else None
        where = f" [{self.version}]" if self.version else ""
        super().__init__(f"{self.problem}{where} Next step: {self.next_step}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.problem, self.next_step, self.version is not None))


def _rebuild(kind: type[MCoreFusedError], problem: str, next_step: str, about_megatron: bool) -> MCoreFusedError:
    return kind(problem, next_step, about_megatron=about_megatron)


class CallArgumentError(MCoreFusedError, ValueError):
    """An argument has an impossible value: shape, temperature, reduction, label."""

    def __init__(self, problem: str, next_step: str, *, about_megatron: bool = False) -> None:
        super().__init__(problem, next_step, about_megatron=about_megatron)


class CallTypeError(MCoreFusedError, TypeError):
    """An argument has the wrong type or dtype."""

    def __init__(self, problem: str, next_step: str, *, about_megatron: bool = False) -> None:
        super().__init__(problem, next_step, about_megatron=about_megatron)


class UnsupportedModelError(MCoreFusedError):
    """No fused forward can be given to this model: unknown wrapper, unknown class, no reachable head."""


class UnsupportedOutputLayerError(UnsupportedModelError):
    """The output layer computes more than ``hidden @ weight.T``: bias, adapter, quantised weight, unknown class."""


class UnsupportedConfigError(UnsupportedModelError):
    """A configuration asks for something that the fused path would bypass."""


class ModeError(MCoreFusedError):
    """A mode was asked for that this model does not have, or its promise could not be proved."""


class ForeignPatchError(MCoreFusedError):
    """Somebody else has replaced ``forward`` on this instance."""


class PatchOrderError(MCoreFusedError):
    """Our patch is not the outermost any more, so removing it would remove another's."""


class FusionDidNotRunError(MCoreFusedError):
    """Fusion was asked for, the model returned, and the fused head never ran."""


class DeferredLogitsError(MCoreFusedError, TypeError):
    """The model did something to the logits that the fused path does not know."""


class PackingError(CallArgumentError):
    """A packing layout is impossible or does not belong to the tensor it is given."""


class RegistryError(MCoreFusedError, LookupError):
    """No fused forward is registered for this architecture, or several are."""
