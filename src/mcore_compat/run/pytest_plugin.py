"""A pytest plugin that the runner loads inside a cell: what ran there, and where the modules really came from.

Standard library and pytest only, since a cell has none of the harness's dependencies. At the end of every pytest
process (workers included) it writes ``origins-<pid>.json`` beside the other results, atomically. A suite that judges a
fused forward writes its own facts, so that the one can be compared with the other; for an ordinary suite, which knows
nothing of the harness, the plugin writes ``facts.json`` too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_compat.run.variables import OUT, PACKAGE, PACKAGE_SOURCE, ROOTS
from mcore_compat.subjects.protocol import VARIABLE

__all__ = ["pytest_collection_finish", "pytest_sessionfinish"]

_OF_IMAGE = ("torch", "triton", "numpy")
_WATCHED = ("megatron", "mcore_fused", "verl", *_OF_IMAGE)
_STARTED = time.monotonic()
_collected: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember what is to run."""
    _collected[:] = [item.nodeid for item in session.items]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what this process has imported, and from where; and the facts, if the suite judges no fused forward."""
    target = os.environ.get(OUT)
    if not target:
        return
    _write(Path(target) / f"origins-{os.getpid()}.json", _origins())
    if VARIABLE in os.environ or session.config.pluginmanager.has_plugin("dsession"):  # its workers run the tests
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    _write(Path(target) / (f"facts.{worker}.json" if worker else "facts.json"), _facts())


def _origins() -> dict[str, Any]:
    home = Path(sysconfig.get_path("purelib")).resolve()
    # On a GPU host these three are the image's, from folders that the lane names; nothing else may come from there.
    image = [Path(site).resolve() for site in _listed("MCORE_COMPAT_IMAGE")]
    here = [Path(folder).resolve() for folder in _listed(ROOTS)]
    source = [Path(folder).resolve() for folder in _listed(PACKAGE_SOURCE)]
    own = _listed(PACKAGE)
    # The longest name first: a package may add to a namespace that is watched itself.
    watched = sorted({*_WATCHED, *own}, key=len, reverse=True)
    counts = dict.fromkeys(watched, 0)
    foreign: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Some of torch's modules carry a made-up relative name.
        if not isinstance(file, str) or not Path(file).is_absolute():
            continue
        top = next((known for known in watched if name == known or name.startswith(f"{known}.")), None)
        if top is None:
            continue
        counts[top] += 1
        roots = [home, *here, *(image if top in _OF_IMAGE else []), *(source if top in own else [])]
        if not any(Path(file).resolve().is_relative_to(root) for root in roots):
            foreign[name] = file
    return {
        "attempt": os.environ.get("MCORE_COMPAT_ATTEMPT", ""),
        "modules": counts,
        "foreign": dict(sorted(foreign.items())[:10]),
        "versions": {
            "megatron-core": _distribution("megatron-core"),
            **{name: _version(name) or "" for name in ("torch", "triton", "numpy")},
        },
    }


def _facts() -> dict[str, Any]:
    """What the judge needs to know of an ordinary suite; a fused forward's traits are absent."""
    core = sys.modules.get("megatron.core")
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "megatron_core": {
            "distribution": _distribution("megatron-core") or None,
            "attribute": _version("megatron.core"),
            "origin": None if core is None else _origin(Path(str(core.__file__))),
        },
        "subject": "",
        "python": platform.python_version(),
        "torch": _version("torch") or _distribution("torch"),
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "device": torch.cuda.get_device_name() if torch is not None and on_gpu else "cpu",
        "collected": _collected,
        "seconds": {"imports": 0.0, "suite": round(time.monotonic() - _STARTED, 2)},
        "complete": True,
    }


def _origin(file: Path) -> str:
    file, prefix = file.resolve(), Path(sys.prefix).resolve()
    return str(file.relative_to(prefix)) if file.is_relative_to(prefix) else f"outside: {file.name}"


def _listed(variable: str) -> list[str]:
    return [part for part in os.environ.get(variable, "").split(os.pathsep) if part]


def _version(module: str) -> str | None:
    """What an imported module says of itself."""
    found = getattr(sys.modules.get(module), "__version__", None)
    return None if found is None else str(found)


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
