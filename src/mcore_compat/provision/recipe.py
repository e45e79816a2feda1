"""What an environment is made of, and the hash that identifies it."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_compat.files.digest import digest_of_file, digest_of_json
from mcore_compat.matrix.cells import Cell
from mcore_compat.matrix.source import local_path
from mcore_compat.records import Package

__all__ = ["Recipe", "recipe_of"]

# Raised when the way an environment is made changes, so that old ones are made again.
_GENERATION = 1


@dataclass(frozen=True)
class Recipe:
    """The inputs of one environment.

    Attributes:
        python: interpreter, major and minor.
        requirements: in installer syntax, sorted.
        constraints: likewise.
        build_megatron: megatron-core may be built from source; nothing else ever is.
        source_digest: hash of a wheel given as source; None for a release. A folder or git reference has none either
            and is therefore never reused.
        without_dependencies: requirements that are installed by themselves, after the others.
        package: name, extras and dependencies of the project's own package, which are resolved with the others; not
            its content, which is installed afterwards.
    """

    python: str
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    build_megatron: bool
    source_digest: str | None = None
    without_dependencies: tuple[str, ...] = ()
    package: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """Hex digest over all inputs."""
        fields = {**self.__dict__, "generation": _GENERATION}
        for later in ("without_dependencies", "package"):
            if not fields[later]:
                del fields[later]  # what has none is what it was before there could be any
        return digest_of_json(fields)


def recipe_of(cell: Cell, common: tuple[str, ...], package: Package | None = None) -> Recipe:
    """The recipe of a cell's environment.

    Args:
        cell: the cell.
        common: what every cell's suite needs.
        package: the project's own package.
    """
    brought = () if package is None else (package.wheel.name, *package.extras, *package.requires)
    own = (f"torch=={cell.torch}", cell.megatron_requirement, *(item.spec for item in cell.requirements))
    path = local_path(cell.source) if cell.source is not None else None
    wheel = path if path is not None and path.suffix == ".whl" else None
    # A wheel elsewhere is not built either; its content is not known here, so its environment is never reused.
    is_wheel = cell.source is not None and cell.source.endswith(".whl")
    return Recipe(
        python=cell.python,
        requirements=tuple(sorted({*own, *common})),
        constraints=tuple(sorted({item.spec for item in cell.constraints})),
        build_megatron=cell.builds_megatron and not is_wheel,
        source_digest=digest_of_file(wheel) if wheel is not None else None,
        without_dependencies=tuple(sorted({item.spec for item in cell.without_dependencies})),
        package=brought,
    )
