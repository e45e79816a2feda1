"""Typed errors of mcore_fused. Each names the object, the megatron-core version, and the next step.

:class:`McoreFusedError` is the root of all of them. Argument errors are also ``ValueError`` or ``TypeError``, so
that code without knowledge of this package handles them as usual.
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
    "McoreFusedError",
    "ModeError",
    "PackingError",
    "PatchOrderError",
    "RegistryError",
    "UnsupportedConfigError",
    "UnsupportedModelError",
    "UnsupportedOutputLayerError",
    "UnusableHookWarning",
]


@functools.cache
def megatron_version() -> str:
    """Return the installed megatron-core as a label for messages; it never decides behaviour."""
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "megatron-core (no distribution metadata)"


def qualified_name(thing: object) -> str:
    """Return ``module.QualName`` of a class or function, or of the class of an instance."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def _sentence(text: str) -> str:
    """Return the text without surrounding blanks, and with a full stop if it has no final mark."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


class McoreFusedError(Exception):
    """Root of this package's errors: one sentence about the problem, then one about what to do.

    Both sentences end in a full stop, which is added if a caller left it out. Also available under the name
    ``MCoreFusedError``.

    Attributes:
        problem: what is wrong, naming the object.
        next_step: what the caller can do about it.
        version: the installed megatron-core, or None if Megatron is not involved.
    """

    def __init__(self, problem: str, next_step: str, *, about_megatron: bool = True) -> None:
        self.problem = _sentence(problem)
        self.next_step = _sentence(next_step)
        self.version = megatron_version() if about_megatron else None
        where = f" [{self.version}]" if self.version else ""
        super().__init__(f"{self.problem}{where} Next step: {self.next_step}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.problem, self.next_step, self.version is not None))


MCoreFusedError = McoreFusedError
"""The root class under the name of earlier releases; both names stay."""


def _rebuild(kind: type[McoreFusedError], problem: str, next_step: str, about_megatron: bool) -> McoreFusedError:
    return kind(problem, next_step, about_megatron=about_megatron)


class CallArgumentError(McoreFusedError, ValueError):
    """An argument has an impossible value: shape, temperature, reduction, label."""

    def __init__(self, problem: str, next_step: str, *, about_megatron: bool = False) -> None:
        super().__init__(problem, next_step, about_megatron=about_megatron)


class CallTypeError(McoreFusedError, TypeError):
    """An argument has the wrong type or dtype."""

    def __init__(self, problem: str, next_step: str, *, about_megatron: bool = False) -> None:
        super().__init__(problem, next_step, about_megatron=about_megatron)


class UnsupportedModelError(McoreFusedError):
    """The model cannot be patched: unknown wrapper, unknown class, or no reachable head."""


class UnsupportedOutputLayerError(UnsupportedModelError):
    """The output layer computes more than ``hidden @ weight.T``: bias, adapter, quantised weight, unknown class."""


class UnsupportedConfigError(UnsupportedModelError):
    """The configuration asks for something that the fused path would bypass."""


class ModeError(McoreFusedError):
    """The requested mode is not available on this model, or it could not be verified."""


class ForeignPatchError(McoreFusedError):
    """Another patch has replaced ``forward`` on this instance."""


class PatchOrderError(McoreFusedError):
    """Another patch was installed on top, so that removing this one would remove the other."""


class FusionDidNotRunError(McoreFusedError):
    """Fusion was requested, and the fused head did not run exactly once."""


class DeferredLogitsError(McoreFusedError, TypeError):
    """The model applied an operation to its logits that the fused path does not support."""


class PackingError(CallArgumentError):
    """A packing layout is impossible, or does not match the tensor that it is used with."""


class RegistryError(McoreFusedError, LookupError):
    """The architecture is not named, is ambiguous, or conflicts with its registration."""


class UnusableHookWarning(UserWarning):
    """A model declares the ``output_processor`` hook, and it cannot be used; legacy mode is used instead."""
