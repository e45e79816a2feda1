"""The package of another project: built from its root, and what its wheel says of itself.

The harness's own wheel is not built for it: an installed harness is packed again from its files, since its plugin goes
into every cell and a checkout of this project need not be there.
"""

from __future__ import annotations

import base64
import csv
import email.parser
import hashlib
import importlib.metadata
import io
import json
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from mcore_compat.errors import InfrastructureError, UsageError
from mcore_compat.files.digest import digest_of_file
from mcore_compat.provision.project_wheel import build_wheel, described
from mcore_compat.provision.uv import Uv
from mcore_compat.provision.uv_environment import HARNESS
from mcore_compat.records import Package, ProjectWheel
from mcore_compat.settings import package_name

__all__ = ["SUITE_REQUIREMENTS", "build_package", "harness_wheel", "suite_requirements"]

SUITE_REQUIREMENTS = "suite"
_PACKED_AT = (2020, 1, 1, 0, 0, 0)
# Written by the installer; a wheel has none of them.
_OF_INSTALLER = frozenset({"INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json"})


def build_package(
    root: Path,
    store: Path,
    uv: Uv,
    *,
    extras: Sequence[str] = (),
    editable: bool = False,
    links: Sequence[Path] = (),
) -> Package:
    """Build the wheel of the project at ``root`` and read what it brings and needs.

    Args:
        root: the project's root, with its ``pyproject.toml``.
        store: where the wheel goes, under its own hash.
        uv: the installer, which calls the project's build backend.
        extras: of its optional dependencies, those to install.
        editable: install it so that its modules are read from ``root``.
        links: folders of wheels for its dependencies.

    Raises:
        UsageError: there is no such extra.
        InfrastructureError: it does not build, or what was built is the wheel of another project.
    """
    declared = package_name(root)
    wheel = build_wheel(root, store, uv, whose=f"The package {declared or root.name}")
    name = canonicalize_name(wheel.name)
    if (declared is not None and name != declared) or name == HARNESS:
        raise InfrastructureError(
            f"{root.name} built a wheel of {name}, not of {declared or 'its own package'}.",
            "Correct `name` in pyproject.toml; a package under test cannot have the harness's name.",
        )
    with zipfile.ZipFile(wheel.wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode("utf-8")
    message = email.parser.HeaderParser().parsestr(metadata)
    offered = [canonicalize_name(extra) for extra in message.get_all("Provides-Extra", [])]
    wanted = tuple(sorted(canonicalize_name(extra) for extra in extras))
    unknown = [extra for extra in wanted if extra not in offered]
    if unknown:
        raise UsageError(
            f"{name} has no extra `{unknown[0]}`.", f"Its extras are: {', '.join(offered) or 'none'}; correct `extras`."
        )
    return Package(
        wheel=ProjectWheel(name, wheel.version, wheel.sha256, wheel.commit, wheel.wheel),
        extras=wanted,
        requires=_needed(message.get_all("Requires-Dist", []), wanted),
        modules=_modules(names),
        source=root if editable else None,
        links=tuple(links),
    )


def suite_requirements() -> tuple[str, ...]:
    """What the runner's pytest needs in every cell: the extra ``suite`` of the harness's own distribution.

    Raises:
        InfrastructureError: the harness is not installed as a distribution.
    """
    found = _harness_distribution().requires or []
    parsed = [Requirement(text) for text in found]
    kept = [r for r in parsed if r.marker is not None and r.marker.evaluate({"extra": SUITE_REQUIREMENTS})]
    return tuple(f"{r.name}{r.specifier}" for r in kept if not r.marker or not r.marker.evaluate({"extra": ""}))


def harness_wheel(store: Path, uv: Uv) -> ProjectWheel:
    """The wheel of the running harness: built if it runs from a checkout, else packed from what is installed.

    Raises:
        InfrastructureError: it is not installed, or a file of it was changed.
    """
    distribution = _harness_distribution()
    checkout = _checkout_of(distribution)
    if checkout is not None:
        return build_wheel(checkout, store, uv, whose="The harness's own wheel")
    return _packed(distribution, store)


def _harness_distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(HARNESS)
    except importlib.metadata.PackageNotFoundError as exc:
        raise InfrastructureError(
            "The harness is imported from a folder and is not installed.", f"Install it: `pip install {HARNESS}`."
        ) from exc


def _checkout_of(distribution: importlib.metadata.Distribution) -> Path | None:
    """The folder of an editable installation."""
    address = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not address.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(address["url"]).path))


def _packed(distribution: importlib.metadata.Distribution, store: Path) -> ProjectWheel:
    """The installed files as a wheel; equal files give an equal wheel."""
    entries: dict[str, bytes] = {}
    folder = ""
    for file in distribution.files or ():
        path = PurePosixPath(file)
        if path.parts[0] == ".." or path.suffix == ".pyc":
            continue
        if path.parts[0].endswith(".dist-info"):
            folder = path.parts[0]
            if path.name in _OF_INSTALLER:
                continue
        try:
            content = Path(str(file.locate())).read_bytes()
        except OSError as exc:
            raise _changed(f"{path} is missing") from exc
        if file.hash is not None and _hashed(content, file.hash.mode) != file.hash.value:
            raise _changed(f"{path} was changed")
        entries[path.as_posix()] = content
    if not folder:
        raise _changed("its metadata is missing")
    entries = dict(sorted(entries.items()))
    entries[f"{folder}/RECORD"] = _record(entries, folder)
    store.mkdir(parents=True, exist_ok=True)
    name = f"{folder.removesuffix('.dist-info')}-py3-none-any.whl"
    with tempfile.TemporaryDirectory(dir=store, prefix="pack-") as scratch:
        packed = Path(scratch, name)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path_name, content in entries.items():
                archive.writestr(zipfile.ZipInfo(path_name, _PACKED_AT), content, zipfile.ZIP_DEFLATED)
        home = store / digest_of_file(packed)[:16]
        home.mkdir(exist_ok=True)
        packed.replace(home / name)
    return described(home / name, None)


def _changed(what: str) -> InfrastructureError:
    return InfrastructureError(
        f"The installed {HARNESS} is not as it was released: {what}.", f"Install it again: `pip install {HARNESS}`."
    )


def _record(entries: dict[str, bytes], folder: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, content in entries.items():
        writer.writerow([name, f"sha256={_hashed(content, 'sha256')}", len(content)])
    writer.writerow([f"{folder}/RECORD", "", ""])
    return text.getvalue().encode()


def _hashed(content: bytes, algorithm: str) -> str:
    return base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()


def _needed(declared: Iterable[str], extras: Sequence[str]) -> tuple[str, ...]:
    """The dependencies that may apply with these extras, in the wheel's own words.

    Raises:
        InfrastructureError: one of them is not a requirement.
    """
    needed = set()
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as exc:
            raise InfrastructureError(
                f"The wheel's dependency `{text}` is not a requirement.", "Correct pyproject.toml."
            ) from exc
        marker = str(requirement.marker or "")
        if "extra ==" not in marker or any(requirement.marker.evaluate({"extra": e}) for e in extras):  # type: ignore[union-attr]
            needed.add(text)
    return tuple(sorted(needed))


def _modules(names: Iterable[str]) -> tuple[str, ...]:
    """The uppermost packages and modules of a wheel, as dotted names; a namespace is left to what is inside it."""
    paths = [PurePosixPath(name) for name in names if name.endswith((".py", ".so"))]
    paths = [path for path in paths if not path.parts[0].endswith((".dist-info", ".data"))]
    packages = {path.parent.parts for path in paths if path.name == "__init__.py"}
    found = set()
    for path in paths:
        above = [path.parts[:depth] for depth in range(1, len(path.parts)) if path.parts[:depth] in packages]
        found.add(".".join(above[0] if above else (*path.parent.parts, path.name.partition(".")[0])))
    return tuple(sorted(found))
