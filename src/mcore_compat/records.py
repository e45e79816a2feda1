"""What the steps of the pipeline hand to each other, as frozen records. No step's code is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from mcore_compat.files.untrusted import cleaned
from mcore_compat.results import Evidence
from mcore_compat.subjects.protocol import DEFAULT_SUBJECT
from mcore_compat.verdicts import Verdict

__all__ = [
    "CheckOutcome",
    "Environment",
    "EnvironmentFacts",
    "Files",
    "Finished",
    "Imported",
    "Origins",
    "Package",
    "ProjectWheel",
    "Provisioned",
    "SuiteFacts",
    "SuiteLog",
    "SuiteMegatron",
    "SuiteRun",
    "SuiteSeconds",
]


class _Fact(BaseModel):
    """Something that a process of a cell wrote: texts are made printable, numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _printable(cls, data: Any) -> Any:
        return cleaned(data)


@dataclass(frozen=True)
class ProjectWheel:
    """The wheel of this project: the library, and the harness's own plugin for the cells.

    Attributes:
        name: distribution name.
        version: distribution version.
        sha256: of the wheel; equal sources give an equal wheel.
        commit: of the checkout it was built from, with ``+dirty`` where files differ; None outside of git.
        wheel: path of the file.
    """

    name: str
    version: str
    sha256: str
    commit: str | None
    wheel: Path


@dataclass(frozen=True)
class Package:
    """The package of the project that is judged, where that is another one than this.

    Attributes:
        wheel: what is installed in every cell; its hash stands for the content of an editable installation too.
        extras: of its optional dependencies, those that are installed.
        requires: its dependencies with these extras, as the wheel declares them.
        modules: dotted names of the packages and modules that it brings, top-level ones first.
        source: the folder that an editable installation reads; None: the wheel is installed.
        links: folders of wheels that its dependencies may come from.
    """

    wheel: ProjectWheel
    extras: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    source: Path | None = None
    links: tuple[Path, ...] = ()

    @property
    def requirement(self) -> str:
        """The wheel with its extras, as an installer takes it."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.wheel.name}{extras} @ {self.wheel.wheel.as_uri()}"


class Files(_Fact):
    """A distribution's files against its RECORD."""

    count: int
    changed: tuple[str, ...] = ()
    changed_count: int = 0
    sha256: str


class Imported(_Fact):
    """What the import of the model's module showed."""

    modules: int
    foreign: dict[str, str]
    attribute: str | None
    origin: str
    versions: dict[str, str]
    seconds: float


class EnvironmentFacts(_Fact):
    """The probe's output.

    Attributes:
        distributions: versions by normalised name.
        files: by distribution, one digest over the files that it has in site-packages.
        changed: the first files of any distribution that differ from its RECORD.
        changed_count: how many there are.
        unowned: files in site-packages that no RECORD names, with a hash of each.
        startup: files that run in every process of the interpreter, with the distribution that brings each.
        tops: top-level names that megatron-core brings, with other distributions that bring the same name.
        plugins: pytest plugins that ask to be loaded, by distribution.
        settings: digest of ``pyvenv.cfg``.
        path: the interpreter's module path, relative to the environment.
    """

    python: str
    user_site: bool
    distributions: dict[str, tuple[str, ...]]
    megatron_roots: tuple[str, ...]
    megatron_files: Files | None
    subject_files: Files | None
    files: dict[str, str] = {}
    changed: tuple[str, ...] = ()
    changed_count: int = 0
    unowned: dict[str, str] = {}
    startup: dict[str, str] = {}
    tops: dict[str, tuple[str, ...]] = {}
    plugins: dict[str, tuple[str, ...]] = {}
    settings: str = ""
    path: tuple[str, ...] = ()
    imported: Imported | None = None
    seconds: float = 0.0

    def version(self, distribution: str) -> str | None:
        """The installed version, or None."""
        found = self.distributions.get(distribution, ())
        return found[0] if found else None


@dataclass(frozen=True)
class Environment:
    """A proved environment.

    Attributes:
        folder: the cell's folder.
        facts: what the probe found.
        lock: the resolved requirements with the index's hashes.
        reused: it was there already.
        remade: why an environment that was there could not be reused; empty: there was none, or the recipe is another.
    """

    folder: Path
    facts: EnvironmentFacts
    lock: str
    reused: bool
    remade: str = ""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def home(self) -> Path:
        """The home folder that its processes get."""
        return self.folder / "home"


@dataclass(frozen=True)
class Provisioned:
    """An environment, or the verdict that stands in its place.

    Attributes:
        output: the whole output of the installer that refused.
    """

    seconds: float
    environment: Environment | None = None
    verdict: Verdict | None = None
    reason: str = ""
    next_step: str = ""
    output: str = ""


@dataclass(frozen=True)
class Finished:
    """How a child ended.

    Attributes:
        returncode: the exit status; negative: the signal that ended it.
        timed_out: it ran past its limit and was killed.
        cancelled: the run was interrupted and it was killed.
        seconds: wall time.
        output: its standard output and error together.
        left_behind: command lines of processes that outlived it, and were killed.
        excess: which limit it passed and was killed for; empty: none.
    """

    returncode: int
    timed_out: bool
    cancelled: bool
    seconds: float
    output: str
    left_behind: tuple[str, ...] = ()
    excess: str = ""


@dataclass(frozen=True)
class CheckOutcome:
    """All cases of one check together.

    Attributes:
        passed: cases whose call passed and whose setup and teardown did not fail.
        failed: cases with a failing phase.
        skipped: cases that were skipped or failed as marked inside the suite.
        message: of the first failing case, else of the first skipped one.
        failures: messages of all failing cases.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    message: str = ""
    failures: tuple[str, ...] = ()

    @property
    def outcome(self) -> Literal["passed", "failed", "skipped"]:
        """The check's own outcome: one failing case fails it, one passing case runs it."""
        if self.failed:
            return "failed"
        return "passed" if self.passed else "skipped"

    @property
    def cases(self) -> int:
        """How many cases there were."""
        return self.passed + self.failed + self.skipped


@dataclass(frozen=True)
class SuiteLog:
    """The whole log.

    Attributes:
        checks: outcome by check id.
        collection_errors: message by file that could not be collected.
        exit_status: what pytest said at its end, or None: the log is incomplete.
        broken_line: 1-based number of the first line that cannot be read, or None.
        problem: why the log cannot be read, if it cannot be read at all.
    """

    checks: Mapping[str, CheckOutcome] = field(default_factory=dict)
    collection_errors: Mapping[str, str] = field(default_factory=dict)
    exit_status: int | None = None
    broken_line: int | None = None
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Whether the suite said that it had ended, and every line can be read."""
        return self.exit_status is not None and self.broken_line is None and not self.problem


class SuiteMegatron(_Fact):
    """The megatron-core that the suite imported."""

    distribution: str | None = None
    attribute: str | None = None
    origin: str | None = None


class SuiteSeconds(_Fact):
    """The suite's own clock."""

    imports: float = 0.0
    suite: float = 0.0


class SuiteFacts(_Fact):
    """``facts.json``: written by the suite at the start and at the end of its session.

    Attributes:
        collected: node ids; at the start already.
        complete: the session came to its end.
        capabilities: what the subject says it has; None where the suite does not say.
        stock: what the unpatched release computes on fixed weights, by name.
        lacks: what it has not, each with the consequence in words.
        not_applicable: checks that were left out for it, each with the capabilities that they are about.
        launches: how often the fused head ran in each check, in the suite's own process.
        controls: how each control ended: checks that run against a subject that is wrong on purpose, and must fail.
    """

    megatron_core: SuiteMegatron
    subject: str = DEFAULT_SUBJECT
    python: str
    torch: str
    triton: str | None = None
    numpy: str | None = None
    device: str
    mode: Literal["hook", "legacy"] | None = None
    evidence: Evidence = Evidence()
    stock: dict[str, tuple[float, ...]] = {}
    collected: tuple[str, ...] = ()
    seconds: SuiteSeconds = SuiteSeconds()
    complete: bool = False
    capabilities: frozenset[str] | None = None
    lacks: dict[str, str] = {}
    not_applicable: dict[str, tuple[str, ...]] = {}
    launches: dict[str, int] = {}
    controls: dict[str, Literal["failed", "passed"]] = {}

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if any(count < 0 for count in (*self.evidence.model_dump().values(), *self.launches.values())):
            raise ValueError("evidence is counted from zero")
        return self


class Origins(_Fact):
    """One pytest process, as the plugin saw it at its end.

    Attributes:
        attempt: the random name of the attempt that it belongs to.
    """

    attempt: str = ""
    modules: dict[str, int]
    foreign: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True)
class SuiteRun:
    """What a run of the suite left behind.

    Attributes:
        finished: how its process ended.
        log: the report log.
        facts: what the suite said of itself, or None.
        facts_problem: why there are none.
        origins: what the harness's plugin saw, one entry a process.
    """

    finished: Finished
    log: SuiteLog
    facts: SuiteFacts | None
    facts_problem: str
    origins: tuple[Origins, ...]
