"""The catalogue of planted faults: read from the TOML files beside this module, checked, planted in a copy.

A fault is data: what goes wrong in the field, the exact text that is replaced, and the check that must fail.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("library", "futures", "upstream", "kernel", "packing", "harness", "runs")
PLACES = ("0.19", "0.18", "0.17", "upstream", "unit", "harness", "run")


class CatalogueError(Exception):
    """An entry is wrong, or its text is no longer in the source: the fault must be planted anew."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        id: unique name.
        what: what goes wrong, in one sentence.
        models: the public report, or the hazard, that it stands for.
        place: where it is looked for: "0.19", "0.18" or "0.17" (the property suite in that release), "upstream"
            (the same in 0.18, with the fault in megatron-core itself), "unit" (unit tests of kernel and packing, Triton
            interpreted), "harness" (unit tests of the harness), "run" (a whole run of the harness on a real cell, with
            the fault in the suite it is given).
        file: below ``src``; for "run" below ``tests``; for "upstream" below the cell's site-packages.
        replace: pairs of old and new text; each old text stands in the file exactly once.
        caught_by: checks, below ``tests``, one of which must fail.
        env: environment variables of the checks.
        verdict: for "run": what the run must end in.
        finding: for "run": the kind of finding that says so.
        kind: what is broken; the name of the file that the entry stands in.
    """

    id: str
    what: str
    models: str
    place: str
    file: str
    replace: tuple[tuple[str, str], ...]
    caught_by: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""
    finding: str = ""
    kind: str = ""

    @property
    def source(self) -> str:
        """The folder of the checkout that ``file`` lies in."""
        return "tests" if self.place == "run" else "src"

    def edited(self, root: Path = ROOT) -> str:
        """The file's text with the fault in it.

        Args:
            root: the checkout; for "upstream" the site-packages of the cell.

        Raises:
            CatalogueError: an old text is not there, or is there more than once.
        """
        path = root / self.file if self.place == "upstream" else root / self.source / self.file
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CatalogueError(f"{self.id}: {self.source}/{self.file} is gone") from None
        for old, new in self.replace:
            count = text.count(old)
            if count != 1:
                raise CatalogueError(f"{self.id}: the text to replace stands {count} times in {self.file}: {old!r}")
            text = text.replace(old, new)
        compile(text, self.file, "exec")
        return text

    def problem(self) -> str:
        """Why it cannot be planted any more, or nothing; a fault of megatron-core is only checked in its cell."""
        if self.place == "upstream":
            return ""
        try:
            self.edited()
        except (CatalogueError, SyntaxError) as error:
            return str(error)
        return ""

    def plant(self, target: Path, root: Path = ROOT) -> None:
        """Copy the folder to ``target`` with this fault in it; the checkout is not touched."""
        text = self.edited(root)
        # With bytecode, which stays valid in a copy that keeps the times of its files: a child compiles one file.
        shutil.copytree(root / self.source, target)
        path = target / self.file
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def plant_upstream(self, target: Path, site: Path) -> None:
        """Make a megatron in ``target`` with this fault in it; every other file is a link to the cell's own."""
        text = self.edited(site)
        top = Path(self.file).parts[0]
        shutil.copytree(
            site / top, target / top, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
        )
        path = target / self.file
        path.unlink()
        path.write_text(text, encoding="utf-8")


def load() -> tuple[Fault, ...]:
    """All faults, in the order of the files.

    Raises:
        CatalogueError: an entry is incomplete or doubled.
    """
    faults = []
    for name in FILES:
        table = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
        faults += [_fault(entry | {"kind": name}) for entry in table["fault"]]
    doubled = {fault.id for fault in faults if sum(other.id == fault.id for other in faults) > 1}
    if doubled:
        raise CatalogueError(f"two faults are called {', '.join(sorted(doubled))}")
    return tuple(faults)


def _fault(entry: dict[str, Any]) -> Fault:
    try:
        fault = Fault(
            **entry
            | {
                "replace": tuple((old, new) for old, new in entry["replace"]),
                "caught_by": tuple(entry.get("caught_by", ())),
            }
        )
    except (TypeError, KeyError, ValueError) as error:
        raise CatalogueError(f"{entry.get('id', 'a fault without id')}: {error}") from None
    promised = bool(fault.verdict and fault.finding) if fault.place == "run" else bool(fault.caught_by)
    if fault.place not in PLACES or not fault.replace or not promised:
        raise CatalogueError(f"{fault.id}: place, replace and caught_by (or verdict and finding) must be there")
    return fault
