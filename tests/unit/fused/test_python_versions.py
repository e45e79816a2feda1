"""The runtime library imports on Python 3.10 and later; the harness says in one sentence that it needs 3.12."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIBRARY = sorted((ROOT / "src/mcore_fused").rglob("*.py"))
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


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_the_library_is_written_for_python_3_10(path):
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
    found = shutil.which("python3.10")
    if found is None:
        return None
    works = subprocess.run([found, "--version"], capture_output=True, check=False)  # pyenv's shim may lead nowhere
    return found if works.returncode == 0 else None


def test_python_3_10_compiles_the_library():
    python = _python_3_10()
    if python is None:
        pytest.skip("there is no Python 3.10 here")
    script = "import sys\nfor path in sys.argv[1:]:\n    compile(open(path, encoding='utf-8').read(), path, 'exec')"
    subprocess.run([python, "-c", script, *map(str, LIBRARY)], check=True, capture_output=True)


def test_the_harness_names_the_python_that_it_needs(monkeypatch):
    """One sentence instead of a syntax error somewhere inside; its first module compiles everywhere."""
    source = (ROOT / "src/mcore_compat/__init__.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 10))
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    with pytest.raises(ImportError, match=r"^mcore_compat needs Python 3\.12 or later; this is Python 3\.11\.$"):
        exec(compile(source, "__init__.py", "exec"), {"__name__": "mcore_compat"})
    monkeypatch.setattr(sys, "version_info", (3, 12, 0, "final", 0))
    exec(compile(source, "__init__.py", "exec"), {"__name__": "mcore_compat"})
