"""A pytest plugin that the runner loads inside a cell: it says where the modules under test really came from.

Standard library and pytest only, since a cell has none of the harness's dependencies. At the end of every pytest
process (workers included) it writes ``origins-<pid>.json`` beside the other results, atomically. The suite's own facts
are written by the suite; these are the harness's, so that the one can be held against the other.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

__all__ = ["pytest_sessionfinish"]

_OF_IMAGE = ("torch", "triton", "numpy")
_WATCHED = ("megatron", "mcore_fused", "verl", *_OF_IMAGE)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write what this process has imported, and from where."""
    target = os.environ.get("MCORE_COMPAT_CELL_OUT")
    if target:
        _write(Path(target) / f"origins-{os.getpid()}.json", _origins())


def _origins() -> dict[str, Any]:
    home = Path(sysconfig.get_path("purelib")).resolve()
    # On a GPU host these three are the image's, from folders that the lane names; nothing else may come from there.
    image = [Path(site).resolve() for site in os.environ.get("MCORE_COMPAT_IMAGE", "").split(os.pathsep) if site]
    counts = dict.fromkeys(_WATCHED, 0)
    foreign: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        top = name.split(".")[0]
        file = getattr(module, "__file__", None)
        # Some of torch's modules carry a made-up relative name.
        if top not in counts or not isinstance(file, str) or not Path(file).is_absolute():
            continue
        counts[top] += 1
        roots = [home, *image] if top in _OF_IMAGE else [home]
        if not any(Path(file).resolve().is_relative_to(root) for root in roots):
            foreign[name] = file
    return {
        "attempt": os.environ.get("MCORE_COMPAT_ATTEMPT", ""),
        "modules": counts,
        "foreign": dict(sorted(foreign.items())[:10]),
        "versions": {
            "megatron-core": _distribution("megatron-core"),
            **{name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "triton", "numpy")},
        },
    }


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
