"""Judges what the probe found in an environment against what was asked for. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from packaging.requirements import Requirement

from mcore_compat import versions
from mcore_compat.matrix.cells import Cell
from mcore_compat.records import EnvironmentFacts, Package

__all__ = ["PYTEST_PLUGINS", "differences", "problems"]

# The pytest plugins of a cell, by module and by the name of their entry point. None is loaded because a distribution
# asks for it.
PYTEST_PLUGINS = {
    "pytest_reportlog.plugin": "pytest_reportlog",
    "pytest_timeout": "timeout",
    "xdist.plugin": "xdist",
    "_hypothesis_pytestplugin": "hypothesispytest",
}
# Written by whoever makes the environment, not by a distribution.
_UNOWNED = frozenset({"_virtualenv.py", "_virtualenv.pth", "mcore_compat_image.pth"})
_MCORE = "megatron-core"


def problems(
    cell: Cell,
    facts: EnvironmentFacts,
    locked: dict[str, str],
    subject_version: str,
    package: Package | None = None,
) -> tuple[str, ...]:
    """Every way in which the environment is not the one asked for; empty: it is proved.

    Args:
        cell: what was asked for.
        facts: what is there.
        locked: version by distribution, as resolved before anything was installed.
        subject_version: of this project's wheel, which was put in.
        package: the package of the project under test, which was put in too.
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
    if package is not None and facts.version(package.wheel.name) != package.wheel.version:
        version = facts.version(package.wheel.name) or "not installed"
        found.append(f"{package.wheel.name} is {version}, not {package.wheel.version}")
    return (*found, *_intruders(facts, package))


def differences(before: EnvironmentFacts, after: EnvironmentFacts, but: Collection[str] = ()) -> tuple[str, ...]:
    """How an environment differs from what was remembered of it; empty: it is the same.

    Args:
        before: what was remembered.
        after: what is there.
        but: distributions that were installed again, with another wheel.
    """
    found = []
    names = sorted((before.files.keys() | after.files.keys()) - set(but))
    for name in names:
        old, new = before.distributions.get(name), after.distributions.get(name)
        if old != new:
            found.append(f"{name} is {_versions(new)}, it was {_versions(old)}")
        elif before.files.get(name) != after.files.get(name):
            found.append(f"files of {name} were changed")
    strays = sorted({path for path, _ in before.unowned.items() ^ after.unowned.items()})
    found += [f"{path} was added, changed or removed, and no distribution owns it" for path in strays]
    if before.startup != after.startup:
        found.append("what runs at the start of the interpreter was changed")
    if (before.settings, before.path, before.user_site) != (after.settings, after.path, after.user_site):
        found.append("the interpreter's settings or its module path were changed")
    if before.python != after.python:
        found.append(f"the interpreter is {after.python}, it was {before.python}")
    return tuple(found)


def _versions(found: tuple[str, ...] | None) -> str:
    return ", ".join(found) if found else "not installed"


def _intruders(facts: EnvironmentFacts, package: Package | None) -> list[str]:
    """What would run in the cell without being the suite, the subject or an import of the candidate."""
    found = []
    if facts.changed_count:
        found.append(f"{facts.changed_count} files differ from what was installed, first {facts.changed[0]}")
    found += [f"no distribution owns {path}" for path in sorted(facts.unowned.keys() - _UNOWNED)[:3]]
    for name, owner in sorted(facts.startup.items()):
        if not name.endswith(".pth") or owner == _MCORE:
            found.append(f"{name} of {owner or 'no distribution'} runs at every start of the interpreter")
    for top, owners in sorted(facts.tops.items()):
        # A package under test may add to the namespace.
        others = [owner for owner in owners if package is None or owner != package.wheel.name]
        if others:
            found.append(f"megatron-core brings `{top}`, which is {others[0]}'s")
    loaded = {*PYTEST_PLUGINS, *PYTEST_PLUGINS.values()}
    for entry in facts.plugins.get(_MCORE, ()):
        name = entry.partition("=")[0].strip()
        if name in loaded or name.startswith("mcore_compat"):
            found.append(f"megatron-core's pytest plugin takes the name of the suite's own, {name}")
    return found


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
