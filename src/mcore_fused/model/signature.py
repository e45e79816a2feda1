"""Parameters of forward functions, read once per function.

``inspect.signature`` costs tens of microseconds, so it runs when a model is patched and not in its calls.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["arguments_by_name", "forward_parameters", "takes_any_keyword"]

_known: weakref.WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def forward_parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a forward function or bound method, without ``self``."""
    key = getattr(forward, "__func__", forward)
    try:
        parameters = _known.get(key)
    except TypeError:  # a callable without weak references
        return inspect.signature(forward).parameters
    if parameters is None:
        parameters = _known[key] = inspect.signature(forward).parameters
    return parameters


def takes_any_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the parameters end in ``**kwargs``."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def arguments_by_name(
    parameters: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without defaults; elements of ``*args`` have no name."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = (name for name, parameter in parameters.items() if parameter.kind in positional)
    return dict(zip(names, args)) | dict(kwargs)  # noqa: B905 - fewer arguments than parameters is usual
