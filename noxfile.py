"""Front door: every session is a thin call of what the project itself offers. Arguments after ``--`` are passed on."""

from __future__ import annotations

from pathlib import Path

import nox
import nox.command

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["compat"]
nox.options.reuse_existing_virtualenvs = True

PYTHON = "3.12"
# The cells' own torch and numpy: one download serves sessions and cells, and types are checked against one torch.
MATRIX, PROJECT = map(nox.project.load_toml, ("compat_matrix/matrix.toml", "pyproject.toml"))
PINS = (f"torch=={MATRIX['defaults']['torch']}", *(item["spec"] for item in MATRIX["defaults"]["constraints"]))
RESULTS = Path("reports")
# Exit codes of the harness: broken, wrong call, inconclusive, interrupted.
CODES, INCONCLUSIVE = (1, 2, 3, 130), 3


def group(*names: str) -> tuple[str, ...]:
    """Dependency groups of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def install(session: nox.Session, *groups: str, extras: str = "harness,suite") -> None:
    """Install this project, editable, with these extras and dependency groups."""
    session.install("-e", f".[{extras}]", *PINS, *group(*groups))


def judge(session: nox.Session, *arguments: str) -> None:
    """Install the harness and run a command that ends with a verdict; nox ends with the same exit code.

    nox turns every failure into 1, which is the code of a broken release. A harness that cannot be installed judged
    nothing, which is 3.
    """
    try:
        install(session, extras="harness")
    except nox.command.CommandFailed:
        raise SystemExit(INCONCLUSIVE) from None
    pass_on(session, "python", "-m", "mcore_compat", *arguments)


def pass_on(session: nox.Session, *command: str, external: bool = False) -> None:
    """Run a command; nox ends with its exit code, or with 3 if it did not end by itself."""
    try:
        session.run(*command, external=external)
    except nox.command.CommandFailed as failed:
        raise SystemExit(failed.return_code if failed.return_code in CODES else INCONCLUSIVE) from None


@nox.session(python=PYTHON)
def compat(session: nox.Session) -> None:
    """Judge every megatron-core of the matrix (the main job)."""
    judge(session, "run", *session.posargs)


def one_cell(cell: str) -> None:
    """A session for one cell, so that ``nox -l`` lists it: ``nox -s 'compat(0.18.2)'``."""

    @nox.session(python=False, name=f"compat({cell})", default=False)
    def compat_cell(session: nox.Session) -> None:
        session.notify("compat", posargs=["--select", cell, *session.posargs])


for entry in MATRIX["cell"]:
    one_cell(entry["id"])


@nox.session(python=PYTHON)
def gate(session: nox.Session) -> None:
    """May we upgrade to this megatron-core? Give a requirement, a wheel, a git reference or a folder."""
    judge(session, "gate", *session.posargs)


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """The GPU lane, with the host's own Python, torch and triton: nothing is installed."""
    pass_on(session, "python3", "ci/gpu", *session.posargs, external=True)


@nox.session(python=PYTHON)
def bundle(session: nox.Session) -> None:
    """The wheels that a GPU host without a network needs, in .bundle/."""
    judge(session, "bundle", *session.posargs)


@nox.session(python=PYTHON)
def ecosystem(session: nox.Session) -> None:
    """The library beside other packages' real code (PEFT's adapters, verl's patch), in a few cells of their own."""
    where = ("--data=compat_matrix/ecosystem", "--suite=tests/ecosystem", "--report-dir=reports/ecosystem")
    judge(session, "run", *where, *session.posargs)


@nox.session(python=PYTHON)
def unit(session: nox.Session) -> None:
    """Unit tests alone."""
    install(session, "test")
    RESULTS.mkdir(exist_ok=True)
    spread = ("-n", "auto", "--dist", "worksteal")  # over all cores
    results = f"--junitxml={RESULTS}/unit.xml"
    session.run("python", "-m", "pytest", "tests/unit", "-q", *spread, results, *session.posargs)


@nox.session(python=PYTHON)
def cluster(session: nox.Session) -> None:
    """A Ray cluster of three nodes on this machine loses nodes, workers and its driver."""
    install(session, extras="harness,suite,ray")
    session.run("python", "-m", "pytest", "tests/cluster", "-q", *session.posargs)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Unit tests, then the property suite on one cell of each contract class and both backports."""
    unit(session)
    session.run("python", "-m", "mcore_compat", "run", "--classes")


@nox.session(python=PYTHON)
def contracts(session: nox.Session) -> None:
    """Read every release from the index again, compare with the committed contracts; then test on real wheels."""
    install(session, "test")
    session.run("python", "-m", "mcore_compat", "contract", "snapshot", "--check", *session.posargs)
    session.run("python", "-m", "pytest", "-q", "-m", "network", "tests/unit/contract", "tests/unit/gate")


@nox.session(python=PYTHON)
def witnesses(session: nox.Session) -> None:
    """Each contract rule's witness must pass without the change that it is about, and fail with it."""
    install(session, extras="harness")
    session.run("python", "tests/witnesses/confirm.py", f"--results={RESULTS}/witnesses.json", *session.posargs)


@nox.session(python=PYTHON)
def faults(session: nox.Session) -> None:
    """Inject every fault of the catalogue; each must be caught by the check that it names."""
    install(session, "test")
    session.run("python", "-m", "compileall", "-q", "src")  # once, rather than in every copy
    session.run("python", "tests/faults/run.py", f"--results={RESULTS}/faults.json", *session.posargs)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Rules and format, of the code and of the workflows."""
    session.install(*group("lint"))
    for check in (("check",), ("format", "--check")):
        session.run("ruff", *check, ".", "ci/bundle", "ci/gpu")
    session.run("zizmor", "--offline", "--no-progress", "--quiet", ".github/workflows", "action.yml")


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Types, strictly."""
    install(session, "types", extras="harness")
    session.run("mypy")


@nox.session(python=PYTHON)
def workflows(session: nox.Session) -> None:
    """The workflows' syntax and expressions; actionlint's package fetches its program from GitHub."""
    session.install(*group("workflows"))
    session.run("actionlint", "-color")


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documentation and its API reference, strictly: a link or an anchor that leads nowhere is an error."""
    session.install(*group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})
