"""What a matrix may name as a megatron-core, and the one form in which the installer gets it."""

import hashlib
from pathlib import Path

import harness_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.errors import MatrixError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.source import installable_source, local_path
from mcore_compat.provision.recipe import recipe_of
from mcore_compat.provision.uv_environment import provision
from mcore_compat.verdicts import Verdict

WHEEL = "megatron_core-0.20.0-cp312-cp312-linux_x86_64.whl"
TEXT = (Path(__file__).parents[3] / "compat_matrix" / "matrix.toml").read_text(encoding="utf-8")

FORMS = {
    "git+file:///srv/Megatron-LM@main": "megatron-core @ git+file:///srv/Megatron-LM@main",
    "git+https://github.com/NVIDIA/Megatron-LM@main": "megatron-core @ git+https://github.com/NVIDIA/Megatron-LM@main",
    "git+ssh://git@host/team/Megatron-LM.git@v1": "megatron-core @ git+ssh://git@host/team/Megatron-LM.git@v1",
    "/srv/Megatron-LM": "megatron-core @ file:///srv/Megatron-LM",
    "../Megatron-LM": "megatron-core @ file:///srv/Megatron-LM",
    "file:///srv/with%20space": "megatron-core @ file:///srv/with%20space",
    "/srv/megatron_core-0.20.0.tar.gz": "megatron-core @ file:///srv/megatron_core-0.20.0.tar.gz",
    f"/srv/{WHEEL}": f"/srv/{WHEEL}",
    f"wheels/{WHEEL}": f"/srv/matrix/wheels/{WHEEL}",
    f"file:///srv/{WHEEL}": f"/srv/{WHEEL}",
    f"https://host/x/{WHEEL}": f"megatron-core @ https://host/x/{WHEEL}",
}


@pytest.mark.parametrize("named", ["", "megatron-core @ ", "Megatron_Core@"])
@pytest.mark.parametrize("text", FORMS)
def test_each_form_with_and_without_the_name_is_the_same(text, named):
    assert installable_source(named + text, Path("/srv/matrix")) == FORMS[text]


@pytest.mark.parametrize("text", FORMS.values())
def test_the_installer_s_form_stays_what_it_is(text):
    assert installable_source(text, Path("/elsewhere")) == text


WRONG = {
    "": "not a source",
    "0.18.2": "name a release with megatron_core",
    "megatron-core==0.18.2": "name a release with megatron_core",
    "git+ftp://host/x@main": "not a place to install from",
    "git+file://": "lacks a repository",
    "git+https:///x@main": "lacks a repository",
    "s3://bucket/x.whl": "not a place to install from",
    "https://host/page.html": "not a wheel or an sdist",
    "numpy @ git+https://host/x@main": "names numpy",
    "/srv/numpy-2.0-py3-none-any.whl": "a wheel of numpy",
    "/srv/new.whl": "not named as wheels are",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_source_is_refused_with_what_is(text):
    with pytest.raises(ValueError, match=WRONG[text]) as raised:
        installable_source(text, Path("/work"))
    assert " | " in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_gives_a_source_or_one_message(text):
    try:
        source = installable_source(text, Path("/work"))
    except ValueError as error:
        assert " | " in str(error)  # noqa: PT017  either outcome is right, and each has its own property
    else:
        assert installable_source(source, Path("/other")) == source


def _matrix(tmp_path, source):
    path = tmp_path / "matrix.toml"
    old = 'id = "0.14.0"\nmegatron_core = "0.14.0"\n'
    assert old in TEXT
    path.write_text(TEXT.replace(old, f'id = "mine"\nmegatron_core = "main"\nsource = "{source}"\n'), encoding="utf-8")
    return load_matrix(path).cell("mine")


def test_a_cell_of_the_matrix_is_in_the_installer_s_form(tmp_path):
    cell = _matrix(tmp_path, "git+file:///srv/Megatron-LM@main")
    assert cell.megatron_requirement == "megatron-core @ git+file:///srv/Megatron-LM@main"
    recipe = recipe_of(cell, ())
    assert cell.megatron_requirement in recipe.requirements
    assert recipe.build_megatron
    assert recipe.source_digest is None


def test_a_relative_wheel_starts_at_the_file_and_is_known_by_its_content(tmp_path):
    (tmp_path / WHEEL).write_bytes(b"a wheel")
    cell = _matrix(tmp_path, WHEEL)
    recipe = recipe_of(cell, ())
    assert cell.megatron_requirement == str(tmp_path / WHEEL)
    assert recipe.source_digest == hashlib.sha256(b"a wheel").hexdigest()
    assert not recipe.build_megatron


def test_a_wheel_on_another_host_is_not_built_and_not_known():
    recipe = recipe_of(build.cell(source=f"megatron-core @ https://host/{WHEEL}"), ())
    assert (recipe.build_megatron, recipe.source_digest) == (False, None)


def test_a_wrong_source_is_a_wrong_file(tmp_path):
    with pytest.raises(MatrixError, match=r"matrix.toml, line \d+: `cell.\d+.source`: `git\+ftp://`") as raised:
        _matrix(tmp_path, "git+ftp://host/x@main")
    assert raised.value.next_step.startswith("Give a .whl")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (f"/srv/{WHEEL}", f"/srv/{WHEEL}"),
        ("megatron-core @ file:///srv/a%20b", "/srv/a b"),
        ("megatron-core @ git+file:///srv/x@main", None),
        ("megatron-core @ https://host/x.tar.gz", None),
    ],
)
def test_what_lies_on_this_host(source, path):
    assert local_path(source) == (Path(path) if path else None)


@pytest.mark.parametrize("source", [f"/nowhere/{WHEEL}", "megatron-core @ file:///nowhere/Megatron-LM"])
def test_a_source_that_is_not_there_is_the_cell_s_verdict_and_the_others_go_on(tmp_path, source):
    made = provision(build.cell(source=source), (), None, tmp_path, None, Path("python"), {})
    assert made.environment is None
    assert made.verdict is Verdict.UNRESOLVABLE
    assert made.reason == f"the cell's source {Path(source).name} is not there"
    assert not list(tmp_path.iterdir())
