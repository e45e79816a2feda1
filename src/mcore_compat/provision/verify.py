"""Judges what the probe found in an environment against what was asked for. Pure."""

from __future__ import annotations

from typing import Any

from packaging.requirements import Requirement

from mcore_compat import versions
from mcore_compat.matrix.cells import Cell
from mcore_compat.records import EnvironmentFacts

__all__ = ["problems"]


def problems(cell: Cell, facts: EnvironmentFacts, locked: dict[str, str], subject_version: str) -> tuple[str, ...]:
    """Every way in which the environment is not the one asked for; empty: it is proved.

    Args:
        cell: what was asked for.
        facts: what is there.
        locked: version by distribution, as resolved before anything was installed.
        subject_version: of the wheel that was put in.
    """
    found: list[str] = []
    found += [f"the interpreter is {facts.python}, not {cell.python}"] * (
        not facts.python.startswith(f"{cell.python}.")
    )
    found += ["the user's own site-packages is on the path"] * facts.user_site
    found += [
        f"{name} is installed more than once ({', '.join(many)})"
        for name, many in sorted(facts.distributions.items())
        if len(many) > 1
    ]
    found += _megatron(cell, facts)
    found += _pinned(cell, facts, locked)
    if facts.subject_files is None or facts.version("mcore-compat") != subject_version:
        found.append(f"the subject is {facts.version('mcore-compat') or 'not installed'}, not {subject_version}")
    elif facts.subject_files.changed_count:
        found.append(f"the subject's file {facts.subject_files.changed[0]} was changed after the install")
    return tuple(found)


def _megatron(cell: Cell, facts: EnvironmentFacts) -> list[str]:
    found: list[str] = []
    distribution = facts.version("megatron-core")
    if distribution is None or facts.megatron_files is None:
        return ["megatron-core is not installed"]
    if cell.source is None and not versions.agree(cell.megatron_core, distribution):
        found.append(f"megatron-core {distribution} is installed, not {cell.megatron_core}")
    inside = [root for root in facts.megatron_roots if root.endswith("site-packages/megatron")]
    if len(facts.megatron_roots) != 1 or inside != list(facts.megatron_roots):
        found.append(f"the package `megatron` has {len(facts.megatron_roots)} roots: {', '.join(facts.megatron_roots)}")
    if facts.megatron_files.changed_count:
        found.append(
            f"{facts.megatron_files.changed_count} files of megatron-core differ from what was installed, "
            f"first {facts.megatron_files.changed[0]}"
        )
    seen = facts.imported
    if seen is not None:
        if seen.foreign:
            name, file = next(iter(seen.foreign.items()))
            found.append(f"{len(seen.foreign)} modules come from elsewhere, first {name} from {file}")
        # A version that the package says of itself may be wrong in a source build; in a release it is the release's.
        if cell.source is None and seen.attribute and not versions.agree(cell.megatron_core, seen.attribute):
            found.append(f"megatron.core says that it is {seen.attribute}, not {cell.megatron_core}")
    return found


def _pinned(cell: Cell, facts: EnvironmentFacts, locked: dict[str, str]) -> list[str]:
    found = []
    torch = facts.version("torch")
    if torch is None or not versions.agree(cell.torch, torch):
        found.append(f"torch is {torch or 'not installed'}, not {cell.torch}")
    for constraint in (Requirement(item.spec) for item in cell.constraints):
        version = facts.version(constraint.name)
        if version is not None and not constraint.specifier.contains(version, prereleases=True):
            found.append(f"{constraint.name} is {version}, which `{constraint}` forbids")
    for name in ("torch", "triton", "numpy"):
        version = facts.version(name)
        if name in locked and version != locked[name]:
            found.append(f"{name} is {version or 'gone'}, but {locked[name]} was resolved")
        imported: Any = facts.imported.versions.get(name) if facts.imported else None
        if imported and version and not versions.agree(version, imported):
            found.append(f"{name} says that it is {imported}, its metadata says {version}")
    return found
