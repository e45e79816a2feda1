"""Versions as labels: order and bounds. No behaviour of a model is ever decided by them."""

from __future__ import annotations

import functools

from packaging.version import InvalidVersion, Version

__all__ = ["agree", "parse", "sort_key", "within"]


@functools.cache
def parse(text: str) -> Version | None:
    """The version that ``text`` spells, or None where it spells none."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def within(label: str, since: str | None, until: str | None) -> bool:
    """Whether ``label`` lies in ``[since, until)``, compared by release number only.

    Only release numbers are compared, so that ``0.18.0rc1`` and ``0.18.0.dev0+hash`` count as 0.18.0: a bound says
    when something came into the code, and builds before the final release have it already. A label that is no
    version lies inside every bound: unknown is not old.
    """
    version = parse(label)
    if version is None:
        return True
    low, high = parse(since) if since else None, parse(until) if until else None
    release = _padded(version)
    return (low is None or release >= _padded(low)) and (high is None or release < _padded(high))


def agree(requested: str, found: str) -> bool:
    """Whether ``found`` is the requested version; a local label such as ``+cu130`` that nobody asked for is ignored."""
    left, right = parse(requested), parse(found)
    if left is None or right is None:
        return requested == found
    return left == right if left.local else left == Version(right.public)


def _padded(version: Version) -> tuple[int, ...]:
    return (*version.release, 0, 0, 0)[:3]


def sort_key(label: str) -> tuple[bool, Version]:
    """Orders labels as versions; what is no version comes first."""
    version = parse(label)
    return (version is not None, version or Version("0"))
