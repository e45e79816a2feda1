"""The names of subjects, what they may claim, and that no check calls mcore_fused on another subject's model."""

import ast
from pathlib import Path

import pytest

from mcore_compat.subjects import protocol
from mcore_compat.subjects.protocol import CAPABILITIES, OWN_INTERFACE, SubjectNameError, load_subject, parse_subject
from mcore_compat.subjects.published import PEERS

SUITE = Path(__file__).parents[2] / "compat"


class _Claims:
    name = "claims"

    def __init__(self, *capabilities):
        self.capabilities = frozenset(capabilities)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("stock", ("built-in", "stock", "")),
        ("verl", ("built-in", "verl", "")),
        ("path/to/file.py:Mine", ("file", "path/to/file.py", "Mine")),
        ("a.b_c:Mine", ("module", "a.b_c", "Mine")),
    ],
)
def test_names_that_are_understood(text, spec):
    found = parse_subject(text)
    assert (found.kind, found.place, found.attribute) == spec


@pytest.mark.parametrize("text", ["", "stok", "a.b", "a.b:", ":C", "a b:C", "file.py:", "file.py:1", "a.b:C:D"])
def test_names_that_are_not(text):
    with pytest.raises(SubjectNameError, match=r"Use one of: mcore_fused, stock, verl, path/to/file.py:Class"):
        parse_subject(text)


def test_published_subjects_are_built_in():
    assert set(PEERS) <= set(protocol.BUILT_IN)


def test_what_a_subject_may_claim(tmp_path):
    for claims, words in (
        (("call", "flying"), "unknown capabilities"),
        (("patch",), "does not claim `call`"),
        (("call", "library"), "functions of mcore_fused itself"),
    ):
        with pytest.raises(SubjectNameError, match=words):
            protocol.checked(_Claims(*claims), "x")
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    name = 'mine'\n    capabilities = frozenset({'call', 'mtp'})\n")
    assert load_subject(f"{file}:Mine", {}).name == "mine"
    with pytest.raises(SubjectNameError, match="has no class `Other`"):
        load_subject(f"{file}:Other", {})
    assert load_subject("stock", {"stock": lambda: _Claims("call")}).capabilities == {"call"}


def _needs(decorators):
    """Capabilities in ``pytest.mark.needs(...)`` anywhere below these expressions."""
    found = set()
    for decorator in decorators:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "needs":
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def _calls_the_library(node):
    """Whether a function imports mcore_fused, or uses a module-level import of it."""
    return any(
        (isinstance(part, ast.ImportFrom) and (part.module or "").startswith("mcore_fused"))
        or (isinstance(part, ast.Import) and any(name.name.startswith("mcore_fused") for name in part.names))
        or (isinstance(part, ast.Name) and part.id == "mcore_fused")
        for part in ast.walk(node)
    )


@pytest.mark.parametrize("path", sorted(SUITE.glob("test_*.py")), ids=lambda path: path.name)
def test_a_check_that_calls_mcore_fused_is_about_mcore_fused(path):
    """Directly or through a helper of its file: such a check needs one of the capabilities that only it has."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calling = {name for name, node in functions.items() if _calls_the_library(node)}
    while True:
        more = {
            name
            for name, node in functions.items()
            if any(isinstance(part, ast.Name) and part.id in calling for part in ast.walk(node))
        }
        if more <= calling:
            break
        calling |= more
    common = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        ):
            common |= _needs([node.value])
    for name in sorted(calling):
        if name.startswith("test_"):
            needs = common | _needs(functions[name].decorator_list)
            assert needs & OWN_INTERFACE, f"{path.name}::{name} calls mcore_fused on a subject's model"
            assert needs <= CAPABILITIES.keys()
