"""What an environment really holds. Run by a cell's own interpreter as a file, with ``-I``; standard library only.

Prints one JSON object. Without ``--import`` nothing of the environment's packages is executed: distributions, the
hashes of their files, files that no distribution owns and the roots of the ``megatron`` namespace are read from disk.
With it the model's module is imported and every ``megatron.*`` module must come from the environment's own
site-packages.

What Python executes is hashed by content. Other large files (libraries of gigabytes) are known by size and time.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import site
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

DEEP_MODULE = "megatron.core.models.gpt.gpt_model"
_EXECUTED = (".py", ".pth", ".pyc", ".txt", ".so", ".json", ".ini", ".cfg", ".toml")
_HASHED_BYTES = 4 << 20
# Written by the installer, with the time or the place of the install in them.
_NOTES = ("/direct_url.json", "/INSTALLER", "/REQUESTED", "/RECORD", "/uv_cache.json", "/uv_build.json")
_SHOWN = 5


def main(arguments: list[str]) -> None:
    """Print the facts of this interpreter's environment."""
    started = time.monotonic()
    home = Path(sysconfig.get_path("purelib")).resolve()
    site_files = _Site(home)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "user_site": bool(site.ENABLE_USER_SITE),
        "distributions": _distributions(),
        "megatron_roots": [_relative(Path(root)) for root in _megatron_roots()],
        "megatron_files": site_files.against_record("megatron-core"),
        "subject_files": site_files.against_record("mcore-compat"),
        "files": site_files.digests,
        "changed": site_files.changed[:_SHOWN],
        "changed_count": len(site_files.changed),
        "unowned": site_files.unowned(),
        "startup": site_files.startup(),
        "tops": site_files.tops(),
        "plugins": _plugins(),
        "settings": hashlib.sha256(Path(sys.prefix, "pyvenv.cfg").read_bytes()).hexdigest(),
        "path": [_relative(Path(entry)) for entry in sys.path[1:]],
    }
    if "--import" in arguments:
        facts["imported"] = _imported(home)
    facts["seconds"] = round(time.monotonic() - started, 2)
    sys.stdout.write("\n" + json.dumps(facts) + "\n")


def _relative(path: Path) -> str:
    """The path below the environment's prefix, or in full if it is outside."""
    try:
        return path.resolve().relative_to(Path(sys.prefix).resolve()).as_posix()
    except ValueError:
        return str(path)


def _distributions() -> dict[str, list[str]]:
    """Versions by normalised name; more than one version means that two installs lie over each other."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        found.setdefault(_normalised(distribution), []).append(distribution.version)
    return found


def _megatron_roots() -> list[str]:
    spec = importlib.machinery.PathFinder.find_spec("megatron")
    return sorted({*(spec.submodule_search_locations or ())}) if spec else []


def _plugins() -> dict[str, list[str]]:
    """Entry points by which a distribution asks pytest to load its code, by distribution."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        points = [f"{entry.name} = {entry.value}" for entry in distribution.entry_points if entry.group == "pytest11"]
        if points:
            found[_normalised(distribution)] = points
    return found


def _normalised(distribution: importlib.metadata.Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")


class _Site:
    """The files of site-packages, by the distribution whose RECORD names them."""

    def __init__(self, home: Path) -> None:
        """Read every RECORD, and compare every file with it."""
        self._home = home
        self._owners: dict[str, list[str]] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}
        self.changed: list[str] = []
        for distribution in importlib.metadata.distributions(path=[str(home)]):
            self._read(distribution)

    def _read(self, distribution: importlib.metadata.Distribution) -> None:
        name, total, recorded, changed, count = _normalised(distribution), hashlib.sha256(), hashlib.sha256(), [], 0
        # Read by hand: a library object for each of twenty thousand files takes seconds.
        for path, expected in sorted(
            (row[0], row[1])
            for row in csv.reader((distribution.read_text("RECORD") or "").splitlines())
            if len(row) > 1
        ):
            # A wheel that was unpacked and not installed still names its own layout.
            top, _, below = path.partition("/")
            if top.endswith(".data"):
                kind, _, path = below.partition("/")  # noqa: PLW2901
                if kind not in {"purelib", "platlib"}:
                    continue
            if path.startswith(("..", "/")):  # scripts
                continue
            self._owners.setdefault(path, []).append(name)
            if not expected or path.endswith(_NOTES):
                continue
            algorithm, _, wanted = expected.partition("=")
            state = self._state(path, algorithm)
            total.update(f"{path}={state}\n".encode())
            if state.startswith("=") and state[1:] != wanted:
                changed.append(path)
            if ".dist-info/" not in path:
                count += 1
                recorded.update(f"{path}={wanted}\n".encode())
        self.digests[name] = total.hexdigest()
        self.changed += changed
        self._records[name] = {
            "count": count,
            "changed": changed[:_SHOWN],
            "changed_count": len(changed),
            "sha256": recorded.hexdigest(),
        }

    def _state(self, path: str, algorithm: str) -> str:
        """``=`` and the hash of a file as a RECORD spells it; of a large file that is data, size and time."""
        file = f"{self._home}/{path}"
        try:
            known = os.stat(file)  # noqa: PTH116
            if known.st_size > _HASHED_BYTES or not path.endswith(_EXECUTED):
                return f"{known.st_size} bytes at {known.st_mtime_ns}"
            with open(file, "rb") as stream:  # noqa: PTH123
                digest = hashlib.new(algorithm, stream.read()).digest()
        except OSError:
            return "=missing"
        return "=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def against_record(self, name: str) -> dict[str, Any] | None:
        """A distribution's files against its RECORD, and one hash over all of what the RECORD says."""
        return self._records.get(name)

    def unowned(self) -> dict[str, str]:
        """Files that no RECORD names, with a hash of each; bytecode beside its source is never read."""
        found = {}
        for folder, folders, names in os.walk(self._home):
            folders[:] = [name for name in folders if name != "__pycache__"]
            prefix = folder[len(str(self._home)) + 1 :]
            for name in names:
                relative = f"{prefix}/{name}" if prefix else name
                if relative not in self._owners:
                    path = Path(folder, name)
                    data = path.read_bytes() if path.is_file() and path.stat().st_size < _HASHED_BYTES else b""
                    found[relative] = hashlib.sha256(data).hexdigest()
        return dict(sorted(found.items())[:100])

    def startup(self) -> dict[str, str]:
        """Files that run in every process of this interpreter, with the distribution that brings each."""
        paths = [*self._home.glob("*.pth"), *self._home.glob("sitecustomize*"), *self._home.glob("usercustomize*")]
        return {path.name: ", ".join(self._owners.get(self._file_of(path), [])) for path in sorted(paths)}

    def _file_of(self, path: Path) -> str:
        return f"{path.name}/__init__.py" if path.is_dir() else path.name

    def tops(self) -> dict[str, list[str]]:
        """Top-level names that megatron-core brings, with the other distributions that bring the same one."""
        by_top: dict[str, set[str]] = {}
        for path, owners in self._owners.items():
            top = path.partition("/")[0]
            if not top.endswith((".dist-info", ".egg-info")) and top != "__pycache__":
                by_top.setdefault(top, set()).update(owners)
        ours = "megatron-core"
        return {top: sorted(owners - {ours}) for top, owners in sorted(by_top.items()) if ours in owners}


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
