"""What an environment really holds. Run by a cell's own interpreter as a file, with ``-I``; standard library only.

Prints one JSON object. Without ``--import`` nothing of the environment's packages is executed: distributions, file
hashes and the roots of the ``megatron`` namespace are read from disk. With it the model's module is imported and every
``megatron.*`` module must come from the environment's own site-packages.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import platform
import site
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

DEEP_MODULE = "megatron.core.models.gpt.gpt_model"


def main(arguments: list[str]) -> None:
    """Print the facts of this interpreter's environment."""
    started = time.monotonic()
    home = Path(sysconfig.get_path("purelib")).resolve()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "user_site": bool(site.ENABLE_USER_SITE),
        "distributions": _distributions(),
        "megatron_roots": [_relative(Path(root)) for root in _megatron_roots()],
        "megatron_files": _files("megatron-core"),
        "subject_files": _files("mcore-compat"),
    }
    if "--import" in arguments:
        facts["imported"] = _imported(home)
    facts["seconds"] = round(time.monotonic() - started, 2)
    sys.stdout.write("\n" + json.dumps(facts) + "\n")


def _relative(path: Path) -> str:
    """The path below the environment's prefix, or in full where it lies outside."""
    try:
        return path.resolve().relative_to(Path(sys.prefix).resolve()).as_posix()
    except ValueError:
        return str(path)


def _distributions() -> dict[str, list[str]]:
    """Versions by normalised name; more than one version means that two installs lie over each other."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
        found.setdefault(name, []).append(distribution.version)
    return found


def _megatron_roots() -> list[str]:
    spec = importlib.machinery.PathFinder.find_spec("megatron")
    return sorted({*(spec.submodule_search_locations or ())}) if spec else []


def _files(name: str) -> dict[str, Any] | None:
    """The installed files of a distribution against its RECORD, and one hash over all of them."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    changed, total = [], hashlib.sha256()
    entries = sorted(distribution.files or (), key=str)
    counted = 0
    for entry in entries:
        # Files without a hash are bytecode and the installer's own notes.
        if entry.hash is None or ".dist-info/" in str(entry):
            continue
        counted += 1
        total.update(f"{entry}={entry.hash.value}\n".encode())
        path = Path(str(entry.locate()))
        digest = hashlib.new(entry.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.hash.value:
            changed.append(str(entry))
    return {"count": counted, "changed": changed[:5], "changed_count": len(changed), "sha256": total.hexdigest()}


def _imported(home: Path) -> dict[str, Any]:
    started = time.monotonic()
    importlib.import_module(DEEP_MODULE)
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    foreign = {
        name: _relative(Path(file))
        for name, module in modules.items()
        if (file := getattr(module, "__file__", None)) and not Path(file).resolve().is_relative_to(home)
    }
    core = sys.modules["megatron.core"]
    return {
        "modules": len(modules),
        "foreign": foreign,
        "attribute": str(getattr(core, "__version__", "")) or None,
        "origin": _relative(Path(str(core.__file__))),
        "versions": {
            name: str(getattr(sys.modules[name], "__version__", ""))
            for name in ("torch", "triton", "numpy")
            if name in sys.modules
        },
        "seconds": round(time.monotonic() - started, 2),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
