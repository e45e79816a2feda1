"""Front door: every session is a thin call of what the project itself offers. Arguments after ``--`` are passed on."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["compat"]
nox.options.reuse_existing_virtualenvs = True

PYTHON = "3.12"
# The cells' own torch and numpy: one download serves sessions and cells, and types are checked against one torch.
DEFAULTS = nox.project.load_toml("compat_matrix/matrix.toml")["defaults"]
PINS = (f"torch=={DEFAULTS['torch']}", *(item["spec"] for item in DEFAULTS["constraints"]))
RESULTS = Path("reports")  # where CI looks for them
COMMAND = ("python", "-m", "mcore_compat")
# Exit codes of the harness: broken, wrong call, could not judge, interrupted.
VERDICTS = (1, 2, 3, 130)
COULD_NOT_JUDGE = 3


def harness(session: nox.Session, *more: str) -> None:
    """Install this project with the harness's needs; editable, so that the sessions see the checkout as it is."""
    session.install("-e", ".[harness]", *PINS, *more)


def judge(session: nox.Session, *arguments: str) -> None:
    """Install the harness and run a command that ends with a verdict; nox ends with the same exit code.

    nox turns every failure into 1, which is the code of a broken release. A harness that cannot be installed judged
    nothing, which is 3.
    """
    try:
        harness(session)
    except nox.command.CommandFailed:
        raise SystemExit(COULD_NOT_JUDGE) from None
    passed_on(session, *COMMAND, *arguments)


def passed_on(session: nox.Session, *command: str, external: bool = False) -> None:
    """Run a command; nox ends with its exit code, or with 3 when it did not end by itself."""
    try:
        session.run(*command, external=external)
    except nox.command.CommandFailed as failed:
        code = failed.return_code
        raise SystemExit(code if code in VERDICTS else COULD_NOT_JUDGE) from None


def group(name: str) -> tuple[str, ...]:
    """A dependency group of pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name)


def script(session: nox.Session, path: str) -> None:
    """Run a script of this checkout."""
    if not Path(path).exists():
        session.error(f"{path} is not in this checkout: this lane has not landed yet")
    session.run("python", path, *session.posargs)


def run_unit(session: nox.Session) -> None:
    """The unit tests, with what they need."""
    session.install("-e", ".[harness,suite]", *PINS, *group("test"))
    RESULTS.mkdir(exist_ok=True)
    session.run("python", "-m", "pytest", "tests/unit", "-q", f"--junitxml={RESULTS}/unit.xml", *session.posargs)


@nox.session(python=PYTHON)
def compat(session: nox.Session) -> None:
    """Judge every megatron-core of the matrix (the main job)."""
    judge(session, "run", *session.posargs)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Unit tests, then the property suite on one cell of each contract class and both backports."""
    run_unit(session)
    passed_on(session, *COMMAND, "run", "--classes")


@nox.session(python=PYTHON)
def unit(session: nox.Session) -> None:
    """Unit tests alone."""
    run_unit(session)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Rules and format, of the code and of the workflows."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".", "ci/bundle", "ci/gpu")
    session.run("ruff", "format", "--check", ".", "ci/bundle", "ci/gpu")
    session.run("zizmor", "--offline", "--no-progress", "--quiet", ".github/workflows")


@nox.session(python=PYTHON)
def workflows(session: nox.Session) -> None:
    """The workflows' syntax and expressions; actionlint's package fetches its program from GitHub."""
    session.install(*group("workflows"))
    session.run("actionlint", "-color")


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Types, strictly."""
    harness(session, *group("types"))
    session.run("mypy")


@nox.session(python=PYTHON)
def ecosystem(session: nox.Session) -> None:
    """The library beside other packages' real code (PEFT's adapters, verl's patch), in a few cells of their own."""
    where = ("--data=compat_matrix/ecosystem", "--suite=tests/ecosystem", "--report-dir=reports/ecosystem")
    judge(session, "run", *where, *session.posargs)


@nox.session(python=PYTHON)
def gate(session: nox.Session) -> None:
    """May we upgrade to this megatron-core? Give a requirement, a wheel, a git reference or a folder."""
    judge(session, "gate", *session.posargs)


@nox.session(python=PYTHON)
def bundle(session: nox.Session) -> None:
    """The wheels that a GPU host without a network needs, in .bundle/."""
    session.install("-e", ".[harness]", *PINS)
    script(session, "ci/bundle")


@nox.session(python=PYTHON)
def contracts(session: nox.Session) -> None:
    """Read every release from the index again, compare with the committed contracts; then test on real wheels."""
    session.install("-e", ".[harness,suite]", *PINS, *group("test"))
    session.run(*COMMAND, "contract", "snapshot", "--check", *session.posargs)
    session.run("python", "-m", "pytest", "-q", "-m", "network", "tests/unit/contract", "tests/unit/gate")


@nox.session(python=False)
def gpu(session: nox.Session) -> None:
    """The GPU lane, with the host's own Python, torch and triton: nothing is installed."""
    passed_on(session, "python3", "ci/gpu", *session.posargs, external=True)


@nox.session(python=PYTHON)
def witnesses(session: nox.Session) -> None:
    """Each contract rule's witness must pass without the change that it is about, and fail with it."""
    harness(session)
    session.run("python", "tests/witnesses/confirm.py", f"--results={RESULTS}/witnesses.json", *session.posargs)


@nox.session(python=PYTHON)
def faults(session: nox.Session) -> None:
    """Plant every fault of the catalogue; each must be caught by the check that it names."""
    session.install("-e", ".[harness,suite]", *PINS)
    session.run("python", "tests/faults/run.py", f"--results={RESULTS}/faults.json", *session.posargs)


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """Side-by-side measurements; results go to one CSV."""
    harness(session)
    script(session, "benchmarks/run.py")


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documentation and its API reference, strictly: a link or an anchor that leads nowhere is an error."""
    session.install(*group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})
