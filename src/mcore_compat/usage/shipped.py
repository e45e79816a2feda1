"""Indices of the releases that come with the distribution, so that a check of releases needs no network."""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from mcore_compat.usage.summary import FORMAT
from mcore_compat.usage.upstream import SummaryCache, UpstreamTree

__all__ = ["INDEX_FILE", "pack", "shipped_tree", "shipped_versions"]

_FILE = "releases.idx.xz"
INDEX_FILE = f"src/mcore_compat/usage/data/{_FILE}"  # in a checkout


@functools.cache
def _content() -> dict[str, Any]:
    path = Path(str(resources.files("mcore_compat.usage"))) / "data" / _FILE
    if not path.is_file():
        return {"format": FORMAT, "summaries": {}, "trees": {}}
    loaded: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return loaded if loaded["format"] == FORMAT else {"format": FORMAT, "summaries": {}, "trees": {}}


def shipped_versions() -> tuple[str, ...]:
    """Releases that have an index."""
    return tuple(_content()["trees"])


def shipped_tree(version: str, cache: SummaryCache) -> UpstreamTree | None:
    """The tree of a release, its summaries handed to the cache; None if it did not come with the distribution."""
    content = _content()
    tree = content["trees"].get(version)
    if tree is None:
        return None
    cache.ship(content["summaries"])
    return UpstreamTree(version, tree["keys"], frozenset(tree["native"]))


def pack(trees: Iterable[UpstreamTree], cache: SummaryCache) -> bytes:
    """The file's content for these trees."""
    summaries: dict[str, str] = {}
    rows = {}
    for tree in trees:
        for path, key in tree.keys.items():
            if key not in summaries:
                found = cache.get(key, lambda: tree.read(path))  # noqa: B023 - called at once
                summaries[key] = json.dumps(found, separators=(",", ":"))
        rows[tree.label] = {"keys": dict(tree.keys), "native": sorted(tree.native)}
    data = {"format": FORMAT, "summaries": summaries, "trees": rows}
    return lzma.compress(json.dumps(data, separators=(",", ":"), sort_keys=True).encode(), preset=6)
