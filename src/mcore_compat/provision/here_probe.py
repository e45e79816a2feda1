"""What an interpreter has, as its user has set it up. Run by that interpreter as a file; standard library only.

Prints one JSON object: versions, the place of ``megatron``, files of megatron-core that differ from what was installed,
and the modules that a suite's pytest needs and that are not there. Arguments: those modules.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

_SHOWN = 20
_TOLD = ("torch", "triton", "numpy", "transformer-engine", "apex", "flash-attn", "mamba-ssm", "verl")


def main(arguments: list[str]) -> None:
    """Print what is here."""
    started = time.monotonic()
    spec = importlib.util.find_spec("megatron")
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "path": [entry for entry in sys.path[1:] if entry],
        "megatron": [str(Path(root).resolve()) for root in (spec.submodule_search_locations or ())] if spec else [],
        "distributions": {name: version for name in ("megatron-core", *_TOLD) if (version := _version(name))},
        "missing": [name for name in arguments if not _there(name)],
        "changed": _changed(),
    }
    facts |= _imported()
    facts["seconds"] = round(time.monotonic() - started, 2)
    sys.stdout.write("\n" + json.dumps(facts) + "\n")


def _imported() -> dict[str, Any]:
    """What the import of megatron.core shows; the error of one that fails."""
    try:
        core = importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is what the caller has to know
        return {"error": f"{type(exc).__name__}: {exc}"}
    file, prefix = Path(str(core.__file__)).resolve(), Path(sys.prefix).resolve()
    inside = file.is_relative_to(prefix)
    torch = sys.modules.get("torch")
    return {
        "attribute": str(getattr(core, "__version__", "")) or None,
        "origin": str(file.relative_to(prefix)) if inside else f"outside: {file.name}",
        "source": str(file.parents[2]),
        "gpus": torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0,
    }


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _changed() -> list[str]:
    """Files of megatron-core that are not as they were installed; an editable installation has no record of them."""
    try:
        distribution = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    # Read by hand: the library leaves out the files that are missing.
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        path, expected = row[0], row[1] if len(row) > 1 else ""
        if not expected or not path.endswith(".py"):
            continue
        algorithm, _, wanted = expected.partition("=")
        try:
            content = Path(str(distribution.locate_file(path))).read_bytes()
        except OSError:
            found.append(f"{path} (missing)")
            continue
        digest = hashlib.new(algorithm, content).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted:
            found.append(path)
    return found[:_SHOWN]


if __name__ == "__main__":
    main(sys.argv[1:])
