"""Where the files of one project are: its data, its suite, its environments and its reports. Paths only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from mcore_compat.errors import UsageError

__all__ = ["Project"]

DATA_FOLDER = "compat_matrix"
# A data folder has at least one of these.
_MARKERS = ("matrix.toml", "rules")
# Marks a page whose code blocks the suite runs.
_RUN_BLOCK = b"<!-- run:"


@dataclass(frozen=True)
class Project:
    """The project whose suite is run, and the places where its inputs and outputs are.

    Attributes:
        root: the project's root folder.
        data: folder of the matrix, the expectations, the contracts and the rules.
        suite: folder of the suite.
        inventory: file with the required checks of the suite.
        cells: folder of the environments.
        reports: folder of the run folders.
    """

    root: Path
    data: Path
    suite: Path
    inventory: Path
    cells: Path
    reports: Path

    @classmethod
    def at(cls, root: Path) -> Self:
        """The project at ``root`` with the default layout."""
        data = root / DATA_FOLDER
        return cls(
            root=root,
            data=data,
            suite=root / "tests" / "compat",
            inventory=data / "inventory.toml",
            cells=root / ".cells",
            reports=root / "reports",
        )

    @classmethod
    def find(cls, root: Path | None = None) -> Self:
        """The project at ``root``, or the one that the working directory is in.

        Raises:
            UsageError: there is no project.
        """
        start = (root or Path.cwd()).resolve()
        for folder in (start, *(start.parents if root is None else ())):
            if any((folder / DATA_FOLDER / marker).exists() for marker in _MARKERS):
                return cls.at(folder)
        raise UsageError(
            f"No {DATA_FOLDER}/matrix.toml was found here.",
            "Run inside a checkout of the project, or name one with --root.",
        )

    @classmethod
    def readable(cls, root: Path | None = None) -> Self:
        """The project as :meth:`find` finds it, else the data that the installed package has.

        For commands that read releases, contracts and rules and run nothing: they work in an empty folder. Reports are
        then written below the working directory.

        Raises:
            UsageError: ``root`` is given and has no project.
        """
        try:
            return cls.find(root)
        except UsageError:
            if root is not None:
                raise
            return replace(cls.at(Path.cwd()), data=_packaged_data(), inventory=_packaged_data() / "inventory.toml")

    def with_paths(
        self,
        *,
        data: Path | None = None,
        suite: Path | None = None,
        inventory: Path | None = None,
        cells: Path | None = None,
        reports: Path | None = None,
    ) -> Self:
        """The same project with other places; what is None stays, and the inventory follows the data."""
        folder = (data or self.data).absolute()
        declared = inventory or (folder / "inventory.toml" if data is not None else self.inventory)
        return replace(
            self,
            data=folder,
            suite=(suite or self.suite).absolute(),
            inventory=declared.absolute(),
            cells=(cells or self.cells).absolute(),
            reports=(reports or self.reports).absolute(),
        )

    @property
    def gpu(self) -> Self:
        """The same project with the suite of the GPU lane: its bounds are those of bf16 on the device."""
        return replace(self, suite=self.root / "tests" / "gpu", inventory=self.data / "inventory-gpu.toml")

    @property
    def gpu_parallel(self) -> Self:
        """The same project with the suite that runs on several GPUs."""
        return replace(
            self, suite=self.root / "tests" / "gpu" / "parallel", inventory=self.data / "inventory-parallel.toml"
        )

    @property
    def has_own_inventory(self) -> bool:
        """Whether the inventory is another one than the data folder's, so that its expectations are shared."""
        return self.inventory != self.data / "inventory.toml"

    @property
    def suite_name(self) -> str:
        """The suite's folder as a reader of the checkout finds it; "" if it is elsewhere."""
        inside = self.suite.is_relative_to(self.root)
        return self.suite.relative_to(self.root).as_posix() if inside else ""

    @property
    def suite_base(self) -> Path:
        """The folder below which all of the suite's sources are."""
        return self.root if self.suite.is_relative_to(self.root / "tests") else self.suite.parent

    @property
    def suite_sources(self) -> tuple[Path, ...]:
        """Files and folders that the suite reads.

        A suite of this project also has the support of the property suite, the examples, and the pages whose code
        blocks it runs. Another suite has its own folder.
        """
        if self.suite_base != self.root:
            return (self.suite,)
        folders = [self.suite, self.root / "tests" / "compat", self.root / "examples"]
        if "gpu" in self.suite.parts:
            folders += [self.root / "tests" / "gpu", self.root / "tests" / "unit" / "kernel"]
        documents = (path for path in (self.root / "docs").rglob("*.md") if "results" not in path.parts)
        pages = [path for path in (*self.root.glob("*.md"), *documents) if _RUN_BLOCK in path.read_bytes()]
        return tuple(dict.fromkeys((*(folder for folder in folders if folder.is_dir()), *sorted(pages))))

    @property
    def matrix_file(self) -> Path:
        """The cells."""
        return self.data / "matrix.toml"

    @property
    def expectations_file(self) -> Path:
        """The declared failures and skips."""
        return self.data / "expectations.toml"

    @property
    def releases_file(self) -> Path:
        """What the package index offers, as committed."""
        return self.data / "releases.json"

    @property
    def contracts(self) -> Path:
        """Folder of the committed contracts."""
        return self.data / "contracts"

    @property
    def rules(self) -> Path:
        """Folder of the rules."""
        return self.data / "rules"

    @property
    def measured_report(self) -> Path:
        """The committed run whose durations balance shards; a project need not have one."""
        return self.root / "docs" / "results" / "cpu" / "report.json"

    @property
    def kept_results(self) -> tuple[Path, ...]:
        """Folders whose reports may name a baseline: the latest run, and the results that the project commits."""
        return (self.reports / "latest", *sorted((self.root / "docs" / "results").glob("*")))


def _packaged_data() -> Path:
    """The data folder in the installed wheel; in an editable installation, that of the checkout."""
    package = Path(__file__).parent
    inside = package / "data"
    return inside if inside.is_dir() else package.parents[1] / DATA_FOLDER
