"""``facts.json``: what this cell's process really was and did, for the judge. Written whole or not at all."""

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import torch


def versions() -> dict:
    """Distribution and attribute version side by side, and where the package really came from."""
    import megatron.core
    import numpy as np
    import triton

    origin = Path(megatron.core.__file__).resolve()
    prefix = Path(sys.prefix).resolve()
    return {
        "megatron_core": {
            "distribution": _distribution("megatron-core"),
            "attribute": getattr(megatron.core, "__version__", None),
            "origin": str(origin.relative_to(prefix)) if origin.is_relative_to(prefix) else f"outside: {origin.name}",
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


_STOCK: dict[str, tuple[float, ...]] = {}


def record_stock(name: str, values: tuple[float, ...]) -> None:
    """Note what the unpatched release computes; the facts take it along, and the gate compares it."""
    _STOCK[name] = values


def stock() -> dict[str, tuple[float, ...]]:
    """What was noted so far."""
    return dict(_STOCK)


def release() -> str:
    """The megatron-core of this cell, as its distribution says it."""
    return _distribution("megatron-core") or "0"


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(facts: dict) -> None:
    """Replace facts.json in one step; nothing where no cell directory is given (a run by hand)."""
    directory = os.environ.get("MCORE_COMPAT_CELL_OUT")
    if directory is None:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    target = Path(directory) / (f"facts.{worker}.json" if worker else "facts.json")
    scratch = target.with_suffix(".tmp")
    scratch.write_text(json.dumps(facts, indent=1, sort_keys=True))
    scratch.replace(target)
