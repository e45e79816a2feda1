"""``mcore-compat init`` in somebody's repository: what it reads, what it writes, and what it leaves alone."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.testing import CliRunner

from mcore_compat.adopt.files import SMOKE, WORKFLOW
from mcore_compat.adopt.survey import survey
from mcore_compat.cli.main import app
from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.errors import McoreCompatError, UsageError
from mcore_compat.project import Project
from mcore_compat.settings import FILE, load_settings

ROOT = Path(__file__).parents[3]
MODEL = """
from megatron.core import parallel_state
from megatron.core.model import Model, Tracker

class Acme(Model):
    def forward(self, *args):
        return super().forward(*args)

def install():
    Tracker.clean = staticmethod(lambda *args: None)
    Tracker.declared = 1
    Tracker.on_instances = 1
    if hasattr(Tracker, "later"):
        Tracker.later = None
"""
UPSTREAM = """
class Model:
    def forward(self, x):
        return x

class Tracker:
    declared: int

    def __init__(self):
        self.on_instances = 0

    @staticmethod
    def clean():
        return None
"""


@pytest.fixture(autouse=True)
def _committed_data(monkeypatch):
    """The data of this checkout, also if the modules come from a copy of them."""
    for user in ("cli.init", "contract.rules.classes", "project"):
        monkeypatch.setattr(f"mcore_compat.{user}.packaged_data", lambda: ROOT / "compat_matrix")


def repository(root, dependencies='["megatron-core>=0.16,<0.19"]', more="", name="acme-rl"):
    files = {
        "pyproject.toml": f'[project]\nname = "{name}"\nversion = "1"\ndependencies = {dependencies}\n{more}',
        "src/acme_rl/__init__.py": "",
        "src/acme_rl/model.py": MODEL,
        "src/acme_rl/plain.py": "import math\n",
        "src/acme_rl/__main__.py": "import megatron.core\n",
        "scripts/train.py": "import megatron.core\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def call(root, *arguments):
    done = CliRunner().invoke(app, ["init", str(root), *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def texts(root):
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def releases(root):
    return [cell.megatron_core for cell in matrix_of(Project.find(root)).cells]


# What is read.


def test_modules_and_what_they_replace_are_found(tmp_path):
    found = survey(repository(tmp_path))
    assert found.package == "acme-rl"
    assert found.modules == ("acme_rl.model",), "neither scripts nor the module that runs on import"
    assert found.replaced == (
        "megatron.core.model.Model.forward",
        "megatron.core.model.Tracker.clean",
        "megatron.core.model.Tracker.declared",
        "megatron.core.model.Tracker.on_instances",
    )
    assert found.tolerated == 1, "what is tested for before it is replaced may be absent"


@pytest.mark.parametrize(
    ("dependencies", "more", "words"),
    [
        ('["mega tron"]', "", "not a requirement"),
        ("[]", 'requires-python = "3"\n', "not a specifier"),
        ("[]", 'requires-python = "<3.10"\n', "admits none of 3.10, 3.11, 3.12, 3.13"),
        ('["megatron-core>=0.99"]', "", "No known release matches"),
    ],
)
def test_declarations_that_cannot_be_used_are_refused(tmp_path, dependencies, more, words):
    repository(tmp_path, dependencies, more)
    before = texts(tmp_path)
    with pytest.raises(McoreCompatError, match=re.escape(words)):
        call(tmp_path)
    assert texts(tmp_path) == before, "nothing is written by a call that fails"


def test_a_repository_without_package_or_megatron_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no pyproject\.toml"):
        call(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"no \[project\] table"):
        call(tmp_path)
    repository(tmp_path)
    (tmp_path / "src/acme_rl/model.py").write_text("import math\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"No package in .* imports megatron"):
        call(tmp_path)
    with pytest.raises(UsageError, match="harness's own"):
        call(ROOT)


# What is written.


@pytest.mark.parametrize("declared", [">=0.16,<0.19", "==0.17.1", "~=0.18.0", ">=0.12,!=0.18.2"])
def test_the_matrix_is_within_the_declared_range(tmp_path, declared):
    call(repository(tmp_path, f'["megatron-core{declared}"]'))
    found = releases(tmp_path)
    assert found
    assert all(SpecifierSet(declared).contains(release) for release in found)
    minors = [Version(release).release[:2] for release in found]
    assert minors == sorted(set(minors)), "one release of each minor version"


def test_the_newest_release_of_each_minor_version_is_taken(tmp_path):
    call(repository(tmp_path))
    assert releases(tmp_path) == ["0.16.1", "0.17.1", "0.18.2"]


def test_an_undeclared_range_is_the_newest_releases_and_said(tmp_path):
    said = call(repository(tmp_path, "[]"))
    assert "no range of megatron-core is declared" in said
    assert len(releases(tmp_path)) == 3


def test_a_range_can_be_given_in_place_of_the_declared_one(tmp_path):
    said = call(repository(tmp_path, '["megatron-core @ git+https://example.org/fork@main"]'), "--releases", "==0.18.*")
    assert releases(tmp_path) == ["0.18.2"]
    assert "no range" not in said


def test_an_extra_and_an_interpreter_reach_the_settings(tmp_path):
    more = 'requires-python = "<3.12"\n[project.optional-dependencies]\nmegatron = ["megatron_core<0.17"]\n'
    call(repository(tmp_path, "[]", more))
    settings = load_settings(tmp_path)
    assert settings.extras == ("megatron",)
    assert {cell.python for cell in matrix_of(Project.find(tmp_path)).cells} == {"3.11"}


def test_settings_are_those_that_a_run_reads(tmp_path):
    said = call(repository(tmp_path))
    project = Project.find(tmp_path)
    assert (project.package, project.is_adopter) == ("acme-rl", True)
    assert (project.suite / SMOKE).is_file()
    assert "next: mcore-compat plan" in said
    assert CliRunner().invoke(app, ["plan", "--root", str(tmp_path)]).stdout.startswith("0.16.1")


def test_existing_tests_do_not_become_a_suite(tmp_path):
    repository(tmp_path)
    (tmp_path / "tests/compat").mkdir(parents=True)
    (tmp_path / "tests/compat/test_own.py").touch()
    call(tmp_path)
    assert Project.find(tmp_path).suite == tmp_path / "tests/megatron_compat"


def test_a_noxfile_is_left_alone_and_gets_a_line_to_copy(tmp_path):
    repository(tmp_path)
    (tmp_path / "noxfile.py").write_text("import nox\n", encoding="utf-8")
    assert 'session.run("mcore-compat", "run"' in call(tmp_path)
    assert (tmp_path / "noxfile.py").read_text() == "import nox\n"


# Twice, and after edits.


def test_the_second_call_changes_nothing(tmp_path):
    call(repository(tmp_path))
    before = texts(tmp_path)
    said = call(tmp_path)
    assert texts(tmp_path) == before
    assert said.count("unchanged") == 2
    assert "the project has settings" in said


@pytest.mark.parametrize("edited", [f"tests/compat/{SMOKE}", WORKFLOW, FILE])
def test_an_edited_file_stays_and_is_named(tmp_path, edited):
    call(repository(tmp_path))
    place = tmp_path / edited
    place.write_text(f"{place.read_text()}# our own line\n", encoding="utf-8")
    before = texts(tmp_path)
    (tmp_path / "src/acme_rl/model.py").write_text(f"{MODEL}\nTracker.other = 1\n", encoding="utf-8")
    said = call(tmp_path)
    assert place.read_text() == before[edited]
    assert edited == FILE or f"{edited}: kept as it is" in said


def test_a_file_that_was_there_before_stays(tmp_path):
    repository(tmp_path)
    (tmp_path / WORKFLOW).parent.mkdir(parents=True)
    (tmp_path / WORKFLOW).write_text("name: ours\n", encoding="utf-8")
    assert f"{WORKFLOW}: kept as it is" in call(tmp_path)
    assert (tmp_path / WORKFLOW).read_text() == "name: ours\n"


def test_an_unedited_suite_follows_the_source(tmp_path):
    call(repository(tmp_path))
    (tmp_path / "src/acme_rl/second.py").write_text("import megatron.core\n", encoding="utf-8")
    assert f"{SMOKE}: updated" in call(tmp_path)
    assert '"acme_rl.second"' in (tmp_path / "tests/compat" / SMOKE).read_text()


def test_a_suite_outside_of_the_project_is_refused(tmp_path):
    root = repository(tmp_path / "repo")
    (root / FILE).write_text('suite = "../elsewhere"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="leads out"):
        call(root)


# The suite that is written, run.


def run_suite(root, upstream):
    package = root / "installed" / "megatron" / "core"
    package.mkdir(parents=True)
    for path, text in {"__init__.py": "", "parallel_state.py": "", "model.py": upstream}.items():
        (package / path).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", root / "tests/compat"],
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'installed'}"},
        cwd=root, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE), done.stdout


def test_the_suite_is_green_where_everything_is_there(tmp_path):
    call(repository(tmp_path))
    failed, output = run_suite(tmp_path, UPSTREAM)
    assert failed == []
    assert "5 passed" in output


def test_the_suite_is_red_where_a_replaced_function_is_gone(tmp_path):
    call(repository(tmp_path))
    # The patch itself would still succeed, and the module imports.
    failed, output = run_suite(tmp_path, UPSTREAM.replace("def clean", "def clean_metrics"))
    assert failed == ["test_what_is_replaced_exists[megatron.core.model.Tracker.clean]"]
    assert "Tracker has no clean" in output


def test_the_suite_is_red_where_a_module_does_not_import(tmp_path):
    call(repository(tmp_path))
    failed, _ = run_suite(tmp_path, UPSTREAM.replace("class Tracker", "class Other"))
    assert "test_module_imports[acme_rl.model]" in failed


def test_without_patches_only_imports_are_tested(tmp_path):
    repository(tmp_path)
    (tmp_path / "src/acme_rl/model.py").write_text("import megatron.core\n", encoding="utf-8")
    call(tmp_path)
    failed, output = run_suite(tmp_path, UPSTREAM)
    assert failed == []
    assert "1 passed" in output


# The workflow, and the action that it calls.


def test_the_workflow_and_the_action_are_clean(tmp_path):
    call(repository(tmp_path))
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is not None:
        command = [zizmor, "--offline", "--no-progress", "--quiet", tmp_path / WORKFLOW, ROOT / "action.yml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    action = (ROOT / "action.yml").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"uses: mcore-compat/mcore-compat@v{version} #" in (tmp_path / WORKFLOW).read_text()
    for used, comment in re.findall(r"uses: (\S+)(.*)", action):
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", used)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    for block in re.findall(r"run: (?:\|\n((?:\s{8,}.*\n)+)|(.*))", action):
        assert "${{" not in "".join(block), "no expression reaches a shell"
    given = re.findall(r"^          (\w+):", (tmp_path / WORKFLOW).read_text().partition("# zizmor")[2], re.MULTILINE)
    assert set(given) <= set(re.findall(r"^  ([\w-]+):\n    description", action, re.MULTILINE))
