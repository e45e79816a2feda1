"""The runtime library and all that runs in a cell are written for Python 3.10; the command line says what it needs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_compat.errors import MissingToolError
from mcore_compat.provision.uv import Uv

ROOT = Path(__file__).parents[3]
LIBRARY = sorted((ROOT / "src/mcore_fused").rglob("*.py"))
SUITES = [path for suite in ("compat", "ecosystem") for path in sorted((ROOT / "tests" / suite).rglob("*.py"))]
# Run by a cell's interpreter as files, or loaded by its pytest.
SCRIPTS = [
    ROOT / "src/mcore_compat" / name
    for name in ("gate/witness_prelude.py", "provision/probe.py", "run/pytest_plugin.py")
]
# Modules and names of the standard library that came after 3.10, as far as one may be tempted here.
LATER = {
    "tomllib": "*",
    "enum": {"StrEnum", "verify", "member"},
    "typing": {
        "LiteralString", "Never", "NotRequired", "Required", "Self", "TypeAliasType", "TypeVarTuple", "Unpack",
        "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type",
    },
    "datetime": {"UTC"},
    "itertools": {"batched"},
    "contextlib": {"chdir"},
    "collections.abc": {"Buffer"},
    "asyncio": {"TaskGroup", "timeout"},
    "math": {"cbrt", "exp2", "sumprod"},
    "warnings": {"deprecated"},
}  # fmt: skip


def _imported(path):
    """Modules of the harness that a file imports, with the packages around them, as files."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "mcore_compat":
                for depth in range(1, len(parts) + 1):
                    base = ROOT.joinpath("src", *parts[:depth])
                    found |= {file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()}
    return found


def _in_cells():
    """What a cell's interpreter runs of the harness: the suites' imports and everything that those import."""
    found, new = set(), {*SCRIPTS, *(file for path in SUITES for file in _imported(path))}
    while new:
        found |= new
        new = {file for path in new for file in _imported(path)} - found
    return sorted(found)


IN_CELLS = _in_cells()
CELL_SIDE = [*LIBRARY, *SUITES, *IN_CELLS, ROOT / "src/mcore_compat/cli/__init__.py"]


def test_what_a_cell_imports_of_the_harness():
    """Few modules, without a dependency: a cell has none of the harness's packages."""
    names = {path.relative_to(ROOT / "src/mcore_compat").as_posix() for path in IN_CELLS}
    assert {"__init__.py", "subjects/protocol.py", "run/pytest_plugin.py", "testing/ranks.py"} <= names
    rooms = {"testing", "subjects", "run", "gate", "provision"}
    assert {name.split("/")[0] for name in names} == {*rooms, "__init__.py"}
    allowed = {*sys.stdlib_module_names, "mcore_compat", "megatron", "pytest", "torch", "mcore_fused", "_pytest"}
    for path in IN_CELLS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {module.split(".")[0] for module in modules} <= allowed, path


@pytest.mark.parametrize("path", CELL_SIDE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_cell_side_is_written_for_python_3_10(path):
    """Its grammar and its imports; a newer interpreter would import it either way."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.TryStar), "except* came with 3.11"
        assert not getattr(node, "type_params", None), "type parameters came with 3.12"
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, "*") for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [(node.value.id, node.attr)]
        for module, name in names:
            later = LATER.get(module, set())
            assert later != "*", f"{module} came after 3.10"
            assert name not in later, f"{module}.{name} came after 3.10"


def _python_3_10():
    try:
        return Uv.find(os.environ).interpreter("3.10")
    except MissingToolError:
        return None


def test_python_3_10_compiles_the_cell_side_and_imports_what_needs_no_torch():
    python = _python_3_10()
    if python is None:
        pytest.skip("there is no Python 3.10 here")
    script = "import sys\nfor path in sys.argv[1:]:\n    compile(open(path, encoding='utf-8').read(), path, 'exec')"
    subprocess.run([python, "-c", script, *map(str, CELL_SIDE)], check=True, capture_output=True)
    importing = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import mcore_compat, mcore_compat.run, mcore_compat.subjects.protocol, mcore_compat.provision.probe"
    )
    subprocess.run([python, "-I", "-B", "-c", importing], check=True, capture_output=True)
    command = importing.partition("\n")[0] + "\nimport runpy; runpy.run_module('mcore_compat', run_name='__main__')"
    done = subprocess.run([python, "-I", "-B", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: The harness needs Python 3.12 or later; this is Python 3.10.",
        "next:  Run it with Python 3.12; cells with another interpreter get their own.",
    ]


def test_the_command_line_names_the_python_that_it_needs(monkeypatch, capsys):
    """Two lines instead of a syntax error somewhere inside, and the exit code of a run that judged nothing."""
    source = (ROOT / "src/mcore_compat/cli/__init__.py").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    with pytest.raises(SystemExit) as caught:
        exec(compile(source, "__init__.py", "exec"), {"__name__": "mcore_compat.cli"})
    assert caught.value.code == 3
    assert capsys.readouterr().err.startswith(
        "error: The harness needs Python 3.12 or later; this is Python 3.11.\nnext:  "
    )
    monkeypatch.setattr(sys, "version_info", (3, 12, 0, "final", 0))
    exec(compile(source, "__init__.py", "exec"), {"__name__": "mcore_compat.cli"})
