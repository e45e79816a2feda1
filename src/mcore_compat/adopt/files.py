"""The files that a project gets: settings, a first suite and a workflow. Pure: texts from a survey and a matrix."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mcore_compat.adopt.survey import Survey
from mcore_compat.errors import UsageError
from mcore_compat.matrix.cells import Cell, Matrix
from mcore_compat.matrix.of_releases import matrix_of_releases
from mcore_compat.project import FUSED_FORWARD
from mcore_compat.settings import FILE, Releases

__all__ = ["ACTION", "SMOKE", "WORKFLOW", "chosen_matrix", "files_of"]

SMOKE = "test_megatron_smoke.py"
WORKFLOW = ".github/workflows/megatron-core.yml"
ACTION = "mcore-compat/mcore-compat"
_PYTHONS = ("3.12", "3.13", "3.11", "3.10")  # the known matrix's own first
_UNDECLARED_MINORS = 3


def chosen_matrix(found: Survey, known: Matrix, wanted: SpecifierSet | None) -> Releases:
    """The newest release of each minor version within the project's range.

    Args:
        found: the project's range and interpreters.
        known: the matrix of the releases that can be installed.
        wanted: a range in place of the declared one; None: the declared one. Without either, the newest three minor
            versions.

    Raises:
        UsageError: no known release is in the range, or no cell can have an interpreter that the project admits.
    """
    span = found.declared if wanted is None else wanted
    cells = matrix_of_releases(Releases(releases=str(span)), known).cells
    # Both the minor version itself and its newest patch release may meet a bound.
    admitted = [python for python in _PYTHONS if any(found.python.contains(f"{python}{end}") for end in ("", ".99"))]
    if not admitted:
        raise UsageError(
            f"`requires-python = {found.python}` admits none of {', '.join(sorted(_PYTHONS, key=Version))}.",
            "Cells have one of these interpreters; correct pyproject.toml.",
        )
    newest = _newest_of_each_minor(cells)
    if not str(span):
        newest = newest[-_UNDECLARED_MINORS:]
    return Releases(releases=newest, python=None if admitted[0] == _PYTHONS[0] else admitted[0])


def _newest_of_each_minor(cells: Iterable[Cell]) -> tuple[str, ...]:
    newest: dict[tuple[int, ...], Version] = {}
    for version in sorted(Version(cell.megatron_core) for cell in cells):
        newest[version.release[:2]] = version
    return tuple(str(version) for version in newest.values())


def files_of(found: Survey, matrix: Releases | None, version: str, suite: str) -> dict[str, str]:
    """Path below the project's root to text.

    Args:
        found: the survey.
        matrix: the releases; None: the project has settings, which are not written again.
        version: of the harness, which the workflow uses.
        suite: folder of the suite, relative to the root; the suite in the wheel gets no test.
    """
    texts = {} if matrix is None else {FILE: _settings(found, matrix, suite)}
    if suite != FUSED_FORWARD:
        texts[str(PurePosixPath(suite, SMOKE))] = _smoke(found)
    texts[WORKFLOW] = _workflow(version)
    return texts


def _settings(found: Survey, matrix: Releases, suite: str) -> str:
    lines = [
        "# Which megatron-core this project is tested with, and how. All keys: `mcore-compat init --help`.",
        f"suite = {json.dumps(suite)}",
        *([f"extras = [{json.dumps(found.extra)}]"] if found.extra else []),
        "",
        "[matrix]",
        "# The newest release of each minor version in range. A specifier in its place takes all known releases.",
        f"releases = {json.dumps(list(matrix.releases))}",
        *([f"python = {json.dumps(matrix.python)}"] if matrix.python else []),
    ]
    return "\n".join(lines) + "\n"


def _tuple(name: str, values: Sequence[str]) -> str:
    rows = "".join(f"    {json.dumps(value)},\n" for value in values)
    return f"{name} = (\n{rows})\n" if values else f"{name} = ()\n"


def _smoke(found: Survey) -> str:
    text = _SMOKE_HEAD + _tuple("MODULES", found.modules)
    if found.replaced:
        return f"{text}# What this project patches or overrides.\n{_tuple('REPLACED', found.replaced)}{_SMOKE_PATCHES}"
    return re.sub(r"import json\nimport subprocess\nimport sys\n", "", text) + _SMOKE_IMPORTS


def _workflow(version: str) -> str:
    return _WORKFLOW.replace("@ACTION@", f"{ACTION}@v{version}")


_SMOKE_HEAD = '''"""First checks on every megatron-core of the matrix; add tests of your own beside this file."""

import importlib
import json
import subprocess
import sys

import pytest

# Every module that uses Megatron.
'''
_SMOKE_IMPORTS = """

@pytest.mark.parametrize("module", MODULES)
def test_module_imports(module):
    importlib.import_module(module)
"""
_SMOKE_PATCHES = (
    '''
# Run in a process of its own: a patch of this project must not hide that its target is gone. An attribute that is
# only declared, or only set on instances, is there as well.
FIND = """
import importlib, inspect, json, sys

def problem(name):
    parts, module = name.split("."), None
    for cut in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    if module is None:
        return f"{name} cannot be imported"
    found = module
    for part in parts[cut:]:
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        classes = [one for one in inspect.getmro(found) if one is not object] if inspect.isclass(found) else []
        if any(part in vars(one).get("__annotations__", {}) for one in classes):
            return ""
        if any(f"self.{part} " in inspect.getsource(one) for one in classes if one.__module__.startswith("megatron")):
            return ""
        return f"{getattr(found, '__qualname__', found.__name__)} has no {part}"
    return ""

names = json.loads(sys.argv[1])
print("RESULT" + json.dumps({name: problem(name) for name in names}))
"""


@pytest.fixture(scope="session")
def problems():
    command = [sys.executable, "-c", FIND, json.dumps(REPLACED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


@pytest.mark.parametrize("symbol", REPLACED)
def test_what_is_replaced_exists(problems, symbol):
    assert not problems[symbol], f"{problems[symbol]} in this megatron-core; this project replaces it"
'''
    + _SMOKE_IMPORTS
)
_WORKFLOW = """name: megatron-core

on:
  pull_request:
  schedule:
    - cron: "17 4 * * 1"
  workflow_dispatch:

permissions: {}

concurrency:
  group: ${{ github.workflow }}-${{ github.event.pull_request.number || github.sha }}
  cancel-in-progress: ${{ github.event_name == 'pull_request' }}

jobs:
  megatron-core:
    name: every megatron-core of the matrix
    runs-on: ubuntu-24.04
    timeout-minutes: 120
    permissions:
      contents: read
    steps:
      - uses: actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2
        with:
          persist-credentials: false
      # Replace the tag by the commit that it points at, if your rules ask for it.
      - uses: @ACTION@ # zizmor: ignore[unpinned-uses]
        with:
          command: run
"""
