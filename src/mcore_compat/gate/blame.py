"""Whose code failed: raised inside megatron-core without a frame of mcore_fused on the stack is upstream's own. Pure.

A check over several ranks fails in the process that started them; its message holds the ranks' own tracebacks, and
those are judged in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mcore_compat.files.untrusted import parsed_json
from mcore_compat.matrix.inventory import check_of

__all__ = ["OURS", "upstream_failures"]

_UPSTREAM = "site-packages/megatron/"
OURS = ("mcore_fused",)
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "([^"]+)", line \d+', re.MULTILINE)


def _stacks(entry: object) -> list[list[str]]:
    """Files on the stacks of one failure: of the ranks where its message has their tracebacks, else its own."""
    own = _frames(entry)
    crash = entry.get("reprcrash") if isinstance(entry, dict) else None
    _, *ranks = str((crash or {}).get("message", "")).split(_TRACEBACK)
    return [_FRAME.findall(text) for text in ranks] or [own]


def _frames(entry: object) -> list[str]:
    """Files of a report's traceback, outermost first; nothing where pytest kept none."""
    if not isinstance(entry, dict):
        return []
    entries = (entry.get("reprtraceback") or {}).get("reprentries") or []
    places = [(frame.get("data") or {}).get("reprfileloc") for frame in entries if isinstance(frame, dict)]
    return [str(place["path"]) for place in places if place]


def upstream_failures(lines: Iterable[str], own: Sequence[str] = OURS) -> frozenset[str]:
    """Checks all of whose failing cases were raised below megatron-core's code, without the judged code on the way.

    Args:
        lines: a suite's report log (``reportlog.jsonl``).
        own: dotted names of the packages and modules that are judged.
    """
    places = tuple(f"/{name.replace('.', '/')}{end}" for name in own for end in ("/", ".py"))
    blamed: dict[str, bool] = {}
    for line in lines:
        try:
            found = _blame(parsed_json(line), places)
        except (ValueError, TypeError, AttributeError, LookupError):
            continue  # a cell can write anything there; what cannot be read blames nobody
        if found is not None:
            check, upstream = found
            blamed[check] = blamed.get(check, True) and upstream
    return frozenset(check for check, upstream in blamed.items() if upstream)


def _blame(event: Any, own: Sequence[str]) -> tuple[str, bool] | None:
    """The check of one report of a failure, and whether upstream is to blame for it; None: it is another report."""
    if event.get("outcome") != "failed" or not event.get("nodeid"):
        return None
    upstream = all(
        bool(frames) and _UPSTREAM in frames[-1] and not any(place in frame for frame in frames for place in own)
        for frames in _stacks(event.get("longrepr"))
    )
    return check_of(str(event["nodeid"])), upstream
