"""Packages that a cell gets without their dependencies: part of its recipe, locked by hash, never built."""

import hashlib
import json
from pathlib import Path

import harness_builders as build

from mcore_compat.matrix.cells import load_matrix
from mcore_compat.provision import uv_environment as provision
from mcore_compat.provision.recipe import recipe_of
from mcore_compat.records import ProjectWheel
from mcore_compat.subjects.published import PEERS

ROOT = Path(__file__).parents[3]
ALONE = ({"spec": "verl==0.9.1", "reason": "its own patch is under test"},)

OWN = provision._Installed(ProjectWheel("mcore-compat", "1.0", "0" * 64, None, Path("mcore_compat.whl")))


class _Uv:
    def __init__(self):
        self.calls = []

    def call(self, arguments, cwd=None):
        words = [str(word) for word in arguments]
        self.calls.append(words)
        if "-o" in words:
            (cwd / words[words.index("-o") + 1]).write_text(f"of {words[-1]}\n", encoding="utf-8")


def _recipe(**changes):
    return recipe_of(build.cell(**changes), ("pytest>=9",))


def test_they_are_part_of_the_recipe():
    plain, other = _recipe(), _recipe(without_dependencies=ALONE)
    assert other.without_dependencies == ("verl==0.9.1",)
    assert other.requirements == plain.requirements
    assert other.identity != plain.identity


def test_a_recipe_without_any_is_what_it_was():
    """The identity over the fields that there were before: no environment is made anew for nothing."""
    plain = _recipe()
    fields = {name: value for name, value in plain.__dict__.items() if name not in {"without_dependencies", "package"}}
    text = json.dumps({**fields, "generation": 1}, sort_keys=True, separators=(",", ":"))
    assert plain.identity == hashlib.sha256(text.encode()).hexdigest()


def test_they_come_after_the_others_by_hash_and_by_themselves(tmp_path):
    uv = _Uv()
    provision._create(_recipe(without_dependencies=ALONE), tmp_path / "cell", uv, Path("python3"), OWN)
    *_, compiled, installed = uv.calls
    for words in (compiled, installed):
        assert {"--no-deps", "--only-binary"} <= set(words)
    assert "--generate-hashes" in compiled
    assert (tmp_path / "cell" / "alone.in").read_text() == "verl==0.9.1\n"
    assert (tmp_path / "cell" / "lock.txt").read_text() == "of requirements.in\nof alone.in\n"
    plain = _Uv()
    provision._create(_recipe(), tmp_path / "plain", plain, Path("python3"), OWN)
    assert len(plain.calls) == len(uv.calls) - 2
    assert not any("--no-deps" in words for words in plain.calls)


def test_the_ecosystem_has_the_verl_that_is_judged():
    cells = load_matrix(ROOT / "compat_matrix" / "ecosystem" / "matrix.toml").cells
    asked = {item.spec for cell in cells if "verl" in cell.tags for item in cell.without_dependencies}
    assert asked == {f"verl=={PEERS['verl'].version}"}
