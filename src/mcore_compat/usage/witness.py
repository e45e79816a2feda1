"""Witnesses of findings about the adopter's uses: lines that a cell's interpreter runs, made where running can tell."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_compat.gate.model import Lines
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.model import Arguments, Use

__all__ = ["witness_lines"]

# An instance may have what its class lacks, so ``missing-member`` has no witness.
_ABOUT_EXISTENCE = frozenset(
    {
        "missing-import",
        "missing-attribute",
        "hidden-import",
        "hidden-attribute",
        "hidden-by-guard",
        "dead-patch",
        "dead-store",
        "dead-override",
    }
)
# What is missing because of another package raises as itself, so that it is not taken for missing here.
_LOOK_UP = """
import importlib, inspect

def look_up(symbol):
    head, *rest = symbol.split(".")
    owner, found, path = None, importlib.import_module(head), head
    for name in rest:
        path = f"{path}.{name}"
        if inspect.ismodule(found) and not hasattr(found, name):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        assert hasattr(found, name), f"{path} does not exist"
        owner, found = found, getattr(found, name)
    return owner, found
"""
_CALL = """
owner, found = look_up({symbol!r})
given, keywords = [None] * {positional}, dict.fromkeys({keywords!r})
static = inspect.getattr_static(owner, {name!r}, None)
if {bound} and not inspect.isclass(found) and not isinstance(static, (staticmethod, classmethod)):
    given.insert(0, None)
bind = inspect.signature(found).{bind}
try:
    bind(*given, **keywords)
except TypeError as error:
    raise AssertionError(str(error)) from error
"""


def witness_lines(finding: UsageFinding, uses: Sequence[Use]) -> Lines | None:
    """What to run with both Megatrons: it passes where the use works.

    Args:
        finding: about one use.
        uses: of the same source.

    Returns:
        None where the finding is about something that importing and looking at signatures does not show.
    """
    if finding.rule in _ABOUT_EXISTENCE:
        return Lines(f"{_LOOK_UP}\nlook_up({finding.symbol!r})\n")
    if finding.rule != "call-does-not-fit":
        return None
    calls = {
        (use.arguments, use.bound)
        for use in uses
        if (use.file, use.line) == (finding.file, finding.line)
        and finding.symbol in {use.symbol, *use.alternatives}
        and use.arguments is not None
    }
    if len(calls) != 1:  # two calls in one line: which of them is meant cannot be told
        return None
    arguments, bound = calls.pop()
    return Lines(_LOOK_UP + _call(finding.symbol, arguments, bound=bound))


def _call(symbol: str, arguments: Arguments, *, bound: bool) -> str:
    more = arguments.open_positional or arguments.open_keywords or arguments.partial
    return _CALL.format(
        symbol=symbol,
        name=symbol.rpartition(".")[2],
        positional=arguments.positional,
        keywords=arguments.keywords,
        bound=bound,
        bind="bind_partial" if more else "bind",
    )
