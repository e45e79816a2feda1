"""Where the files of one project are: its data, its suite, its environments and its reports. Paths only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from mcore_compat.errors import UsageError
from mcore_compat.settings import FILE, TABLE, Settings, load_settings, package_name

__all__ = ["FUSED_FORWARD", "THIS_PROJECT", "Project", "packaged_data", "suite_at"]

DATA_FOLDER = "compat_matrix"
THIS_PROJECT = "mcore-compat"
# The name of the suite that is in the wheel; a project with a fused forward asks for it in place of a folder.
FUSED_FORWARD = "fused-forward"
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
        settings: what the project says of itself.
        is_adopter: it is another project than this one: its package is built from ``root``, and its suite is an
            ordinary one unless its settings name a subject.
    """

    root: Path
    data: Path
    suite: Path
    inventory: Path
    cells: Path
    reports: Path
    settings: Settings = field(default_factory=Settings)
    is_adopter: bool = False

    @classmethod
    def at(cls, root: Path) -> Self:
        """The project at ``root``, laid out as its settings say.

        Raises:
            UsageError: its settings are wrong.
        """
        found = load_settings(root)
        settings = found or Settings()
        name = package_name(root)
        data = (root / settings.matrix).parent if isinstance(settings.matrix, str) else root / DATA_FOLDER
        return cls(
            root=root,
            data=data,
            suite=suite_at(root, settings.suite),
            inventory=root / settings.inventory if settings.inventory else data / "inventory.toml",
            cells=root / ".cells",
            reports=root / "reports",
            settings=settings,
            is_adopter=name != THIS_PROJECT and (found is not None or name is not None),
        )

    @classmethod
    def find(cls, root: Path | None = None) -> Self:
        """The project at ``root``, or the one that the working directory is in.

        Raises:
            UsageError: there is no project.
        """
        start = (root or Path.cwd()).resolve()
        for folder in (start, *(start.parents if root is None else ())):
            if any((folder / DATA_FOLDER / marker).exists() for marker in _MARKERS) or load_settings(folder):
                return cls.at(folder)
        raise UsageError(
            f"No {DATA_FOLDER}/matrix.toml was found here.",
            f"Run inside a project that has it, {FILE} or [tool.{TABLE}] in pyproject.toml, or name one with --root.",
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
            return replace(cls.at(Path.cwd()), data=packaged_data(), inventory=packaged_data() / "inventory.toml")

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
        # A folder of data has a matrix of its own.
        settings = self.settings if data is None else self.settings.model_copy(update={"matrix": None})
        return replace(
            self,
            settings=settings,
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
        return self.inventory != self.data / "inventory.toml" and not self.is_adopter

    @property
    def declares_checks(self) -> bool:
        """Whether the suite has an inventory; this project's always has, and another's if it says so."""
        return not self.is_adopter or self.settings.inventory is not None or self.inventory.is_file()

    @property
    def declares_exceptions(self) -> bool:
        """Whether there is a file of expectations; as for the inventory."""
        return not self.is_adopter or self.settings.expectations is not None or self.expectations_file.is_file()

    @property
    def package(self) -> str | None:
        """The package that is built from the root of another project and installed in every cell; None: there is none.

        Raises:
            UsageError: ``pyproject.toml`` is not TOML.
        """
        return package_name(self.root) if self.is_adopter and self.settings.package else None

    @property
    def title(self) -> str:
        """The project's name in reports."""
        return self.settings.title or package_name(self.root) or self.root.name

    @property
    def wheelhouse(self) -> Path | None:
        """Folder of wheels that all packages come from; None: the index is asked."""
        return self.root / self.settings.wheelhouse if self.settings.wheelhouse is not None else None

    @property
    def suite_name(self) -> str:
        """The suite's folder as a reader of the checkout finds it; "" if it is elsewhere."""
        inside = self.suite.is_relative_to(self.root)
        return self.suite.relative_to(self.root).as_posix() if inside else ""

    @property
    def suite_base(self) -> Path:
        """The folder below which all of the suite's sources are."""
        own = self.suite.is_relative_to(self.root / "tests") and not self.is_adopter
        return self.root if own else self.suite.parent

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
        """The cells, where they are not listed in the settings."""
        named = self.settings.matrix
        return self.root / named if isinstance(named, str) else self.data / "matrix.toml"

    @property
    def expectations_file(self) -> Path:
        """The declared failures and skips."""
        named = self.settings.expectations
        return self.root / named if named is not None else self.data / "expectations.toml"

    @property
    def releases_file(self) -> Path:
        """What the package index offers, as committed."""
        return self.known / "releases.json"

    @property
    def contracts(self) -> Path:
        """Folder of the committed contracts."""
        return self.known / "contracts"

    @property
    def rules(self) -> Path:
        """Folder of the rules."""
        return self.known / "rules"

    @property
    def known(self) -> Path:
        """Folder of the releases, contracts and rules: the data folder, the one above it, else the harness's own."""
        own = (folder for folder in (self.data, self.data.parent) if (folder / "rules").is_dir())
        return next(own, packaged_data())

    @property
    def measured_report(self) -> Path:
        """The committed run whose durations balance shards; a project need not have one."""
        return self.root / "docs" / "results" / "cpu" / "report.json"

    @property
    def kept_results(self) -> tuple[Path, ...]:
        """Folders whose reports may name a baseline: the latest run, and the results that the project commits."""
        return (self.reports / "latest", *sorted((self.root / "docs" / "results").glob("*")))


def packaged_data() -> Path:
    """The data folder in the installed wheel; in an editable installation, that of the checkout."""
    package = Path(__file__).parent
    inside = package / "data"
    return inside if inside.is_dir() else package.parents[1] / DATA_FOLDER


def suite_at(root: Path, named: str) -> Path:
    """The folder of a suite: the one in the wheel by its name, else one of the project."""
    if named != FUSED_FORWARD:
        return root / named
    package = Path(__file__).parent
    inside = package / "suites" / "fused_forward"
    return inside if inside.is_dir() else package.parents[1] / "tests" / "compat"
