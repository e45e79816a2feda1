"""Somebody else's repository: its settings, its package, its ordinary suite, and what the judge asks of it."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import harness_builders as build
import pytest

from mcore_compat.contract.rules.classes import matrix_of
from mcore_compat.errors import InfrastructureError, MatrixError, UsageError
from mcore_compat.judge.cell import judge_cell
from mcore_compat.matrix.inventory import UNDECLARED
from mcore_compat.project import FUSED_FORWARD, Project
from mcore_compat.provision import package as packages
from mcore_compat.provision.recipe import recipe_of
from mcore_compat.provision.uv import Uv, UvFailure
from mcore_compat.provision.uv_environment import provision
from mcore_compat.provision.verify import problems
from mcore_compat.records import Package, ProjectWheel
from mcore_compat.results import SubjectInfo
from mcore_compat.run.pytest_plugin import __file__ as PLUGIN
from mcore_compat.settings import load_settings
from mcore_compat.subjects.selection import OURS, ChosenSubject, subject_of
from mcore_compat.verdicts import Verdict

ONE, TWO, THREE = build.CHECKS
SUITE = ChosenSubject.of_suite("acme-rl")
# A build backend without requirements, so that nothing is asked of an index.
BACKEND = """
import pathlib, zipfile
def get_requires_for_build_wheel(config_settings=None):
    return []
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{file}-0.3.0-py3-none-any.whl"
    info = "{file}-0.3.0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as archive:
        for path in sorted(pathlib.Path("acme_rl").rglob("*.py")):
            archive.writestr(zipfile.ZipInfo(path.as_posix()), path.read_text())
        archive.writestr(zipfile.ZipInfo(info + "METADATA"), '''{metadata}''')
        wheel = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        archive.writestr(zipfile.ZipInfo(info + "WHEEL"), wheel)
        archive.writestr(zipfile.ZipInfo(info + "RECORD"), "")
    return name
"""
METADATA = """Metadata-Version: 2.1
Name: {name}
Version: 0.3.0
Requires-Dist: megatron-core<0.19
Requires-Dist: tabulate; extra == "metrics"
Requires-Dist: sphinx; extra == "docs"
Requires-Dist: tomli; python_version < "3.11"
Provides-Extra: metrics
Provides-Extra: docs
"""


def acme(root, settings="", *, built="acme-rl"):
    """A repository that builds on Megatron, and that knows nothing of this project but its settings."""
    (root / "acme_rl" / "heads").mkdir(parents=True)
    (root / "acme_rl" / "__init__.py").write_text("", encoding="utf-8")
    (root / "acme_rl" / "heads" / "__init__.py").write_text("", encoding="utf-8")
    (root / "tests" / "compat").mkdir(parents=True)
    (root / "tests" / "compat" / "test_a.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    backend = BACKEND.format(file=built.replace("-", "_"), metadata=METADATA.format(name=built))
    (root / "backend.py").write_text(backend, encoding="utf-8")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "acme_rl"\nversion = "0.3.0"\n[tool.mcore-compat]\n{settings}',
        encoding="utf-8",
    )
    return root


RELEASES = 'matrix = { releases = ["0.17.1", "0.18.2"] }\n'


def package(**changes):
    wheel = ProjectWheel("acme-rl", "0.3.0", "cd" * 32, None, Path("/store/acme_rl-0.3.0-py3-none-any.whl"))
    fields = {"wheel": wheel, "requires": ("megatron-core<0.19",), "modules": ("acme_rl",)}
    return Package(**(fields | changes))


# Settings and places.


def test_settings_say_where_everything_is(tmp_path):
    root = acme(tmp_path, f'{RELEASES}suite = "ci/megatron"\ntitle = "Acme"\n')
    project = Project.find(root)
    assert (project.is_adopter, project.title, project.package) == (True, "Acme", "acme-rl")
    assert project.suite == root / "ci" / "megatron"
    assert not project.declares_checks
    assert not project.declares_exceptions
    assert project.rules.is_dir(), "rules and contracts are the harness's own"
    assert project.suite_sources == (project.suite,)


def test_a_project_is_found_from_a_folder_inside_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(acme(tmp_path, RELEASES) / "acme_rl")
    assert Project.find().root == tmp_path


def test_this_checkout_is_not_another_project():
    project = Project.find(Path(__file__).parents[3])
    assert not project.is_adopter
    assert project.package is None
    assert subject_of(project, None) is OURS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("colour = 3\n", "whole table"),
        ('matrix = { releases = ["new"] }\n', "not a version"),
        ('matrix = { releases = "=>0.18" }\n', "not a specifier"),
        ("matrix = { releases = [] }\n", "no release"),
        ('rerun = "{place}"\n', "placeholder"),
        ('links = { docs = "http://example.org" }\n', "links"),
    ],
)
def test_wrong_settings_name_the_key(tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        load_settings(acme(tmp_path, settings))


def test_settings_in_two_places_are_refused(tmp_path):
    (acme(tmp_path, RELEASES) / "mcore-compat.toml").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="Both"):
        load_settings(tmp_path)


# The matrix.


@pytest.mark.parametrize("listed", ['["0.18.2", "0.17.1"]', '">=0.17.1,<0.18,!=0.17.0"'])
def test_listed_releases_bring_what_they_need_and_expect_no_mode(tmp_path, listed):
    text = f'matrix = {{ releases = {listed}, torch = "2.12.0", requirements = ["einops>=0.8"] }}\n'
    matrix = matrix_of(Project.find(acme(tmp_path, text)))
    assert {cell.id for cell in matrix.cells} <= {"0.17.1", "0.18.2"}
    for cell in matrix.cells:
        assert (cell.expected_mode, cell.torch) == (None, "2.12.0")
        assert "einops>=0.8" in [item.spec for item in cell.requirements]
        assert cell.contract_class


def test_an_old_release_keeps_its_own_needs(tmp_path):
    (cell,) = matrix_of(Project.find(acme(tmp_path, 'matrix = { releases = ["0.13.1"] }\n'))).cells
    assert cell.builds_megatron
    assert "packaging>=24" in [item.spec for item in cell.requirements]


@pytest.mark.parametrize(("listed", "words"), [('["0.18.2", "9.9"]', "9.9"), ('">=9"', "No known release")])
def test_a_release_that_is_not_known_is_named(tmp_path, listed, words):
    with pytest.raises(MatrixError, match=words) as caught:
        matrix_of(Project.find(acme(tmp_path, f"matrix = {{ releases = {listed} }}\n")))
    assert "0.18.2" in caught.value.next_step


def test_a_matrix_file_of_an_ordinary_suite_expects_no_mode(tmp_path):
    root = acme(tmp_path, 'matrix = "ci/matrix.toml"\n')
    (root / "ci").mkdir()
    (root / "ci" / "matrix.toml").write_text(
        'schema_version = 1\n[defaults]\npython = "3.12"\ntorch = "2.11.0"\nfused_forward = false\n'
        '[[cell]]\nid = "a"\nmegatron_core = "0.18.2"\n',
        encoding="utf-8",
    )
    (cell,) = matrix_of(Project.find(root)).cells
    assert cell.expected_mode is None


# What is judged.


def test_an_ordinary_suite_judges_the_project_itself(tmp_path):
    subject = subject_of(Project.find(acme(tmp_path, RELEASES)), None)
    assert (subject.name, subject.is_fused, subject.is_ours) == ("acme-rl", False, False)


def test_a_subject_of_the_settings_is_relative_to_the_root(tmp_path, monkeypatch):
    root = acme(tmp_path / "acme", f'{RELEASES}subject = "subject.py:Acme"\nsuite = "{FUSED_FORWARD}"\n')
    (root / "subject.py").write_text("class Acme:\n    pass\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    project = Project.find(root)
    subject = subject_of(project, None)
    assert (subject.name, subject.is_fused) == ("subject.py:Acme", True)
    assert (project.suite / "conftest.py").is_file()


def judged(run, **changes):
    fields = {"subject": SUITE, "package": package(), "inventory": UNDECLARED} | changes
    inventory = fields.pop("inventory")
    cell = build.cell(expected_mode=None)
    return judge_cell(cell, build.provisioned(), run, inventory, build.expectations(), build.TODAY, **fields)


def suite_run(lines=None, **changes):
    facts = build.suite_facts(mode=None, evidence={}, subject="")
    modules = {"megatron": 190, "acme_rl": 4, "mcore_fused": 0}
    return build.suite_run(lines, **({"facts": facts, "origins": (build.origins(modules=modules),)} | changes))


def test_an_ordinary_suite_is_green_without_facts_of_a_fused_forward():
    result = judged(suite_run())
    assert (result.verdict, result.reason, result.checks.planned, result.checks.passed) == (Verdict.OK, "", 3, 3)


def test_a_suite_in_which_nothing_ran_is_never_green():
    nothing = build.suite_facts(mode=None, evidence={}, checks=())
    empty = judged(suite_run(build.log_lines(checks=(), exit_status=5), facts=nothing))
    assert (empty.verdict, "no-checks" in {finding.kind for finding in empty.findings}) == (Verdict.UNPROVEN, True)
    skipped = judged(suite_run(build.log_lines(outcomes=dict.fromkeys(build.CHECKS, "skipped"))))
    assert (skipped.verdict, skipped.findings[0].kind) == (Verdict.UNPROVEN, "nothing-ran")


def test_a_skipped_check_is_told_where_no_inventory_asks_for_it():
    result = judged(suite_run(build.log_lines(outcomes={TWO: "skipped"})))
    assert result.verdict is Verdict.OK
    assert [(finding.kind, TWO in finding.message) for finding in result.findings] == [("skipped-checks", True)]


def test_a_skipped_check_counts_where_an_inventory_asks_for_it():
    run = suite_run(build.log_lines(outcomes={TWO: "skipped"}))
    result = judged(run, inventory=build.inventory(cpu=[], hook=[], legacy=[]))
    assert (result.verdict, result.findings[0].kind) == (Verdict.UNPROVEN, "skipped-check")


def test_a_failed_check_breaks():
    result = judged(suite_run(build.log_lines(outcomes={ONE: "failed"})))
    assert (result.verdict, result.findings[0].check) == (Verdict.BREAK, ONE)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"megatron": 190, "mcore_fused": 20}, "a module of acme-rl"),
        ({"acme_rl": 3}, "imported megatron"),
    ],
)
def test_a_suite_that_imports_something_else_proves_nothing(modules, words):
    result = judged(suite_run(origins=(build.origins(modules=modules),)))
    assert result.verdict is Verdict.UNPROVEN
    assert words in result.reason


def test_a_fused_forward_without_an_expected_mode_is_unproven():
    run = build.suite_run()
    result = judged(run, subject=OURS, package=None, inventory=build.inventory())
    assert result.verdict is Verdict.UNPROVEN
    assert "no-expected-mode" in {finding.kind for finding in result.findings}


def test_a_report_names_the_project_and_the_harness():
    info = SubjectInfo(name="acme-rl", version="0.3.0", sha256="ab", judged="acme-rl", harness="0.1.0")
    assert info.title == "acme-rl 0.3.0, judged by mcore-compat 0.1.0"


# The package.


@pytest.fixture(scope="module")
def uv():
    return Uv.find({"PATH": str(Path(sys.executable).parent)})


def test_the_package_is_built_from_its_own_root(tmp_path, uv):
    built = packages.build_package(acme(tmp_path / "acme"), tmp_path / "store", uv, extras=["metrics"])
    assert (built.wheel.name, built.wheel.version) == ("acme-rl", "0.3.0")
    assert built.modules == ("acme_rl",)
    assert built.requires == (
        "megatron-core<0.19", 'tabulate; extra == "metrics"', 'tomli; python_version < "3.11"',
    )  # fmt: skip
    assert built.requirement.startswith("acme-rl[metrics] @ file:///")


def test_the_wheel_of_another_project_is_not_taken_for_it(tmp_path, uv):
    with pytest.raises(InfrastructureError, match="wheel of mcore-compat, not of acme-rl"):
        packages.build_package(acme(tmp_path / "acme", built="mcore-compat"), tmp_path / "store", uv)


def test_an_unknown_extra_is_named(tmp_path, uv):
    with pytest.raises(UsageError, match="no extra `gpu`") as caught:
        packages.build_package(acme(tmp_path / "acme"), tmp_path / "store", uv, extras=["gpu"])
    assert "metrics, docs" in caught.value.next_step


def test_a_package_inside_of_a_namespace_is_named_by_what_is_its_own():
    names = ["megatron/bridge/__init__.py", "megatron/bridge/x/__init__.py", "tools/a.py", "one.py", "d.data/x.py"]
    assert packages._modules(names) == ("megatron.bridge", "one", "tools.a")


def test_an_installed_harness_is_packed_as_it_was_released(tmp_path):
    """A wheel is installed, packed again, and is the same content; a changed file is refused."""
    site = tmp_path / "site"
    info = site / "mcore_compat-0.1.0.dist-info"
    info.mkdir(parents=True)
    (site / "mcore_compat").mkdir()
    (site / "mcore_compat" / "__init__.py").write_text("x = 1\n", encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mcore-compat\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", encoding="utf-8")
    entries = {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    (info / "RECORD").write_bytes(packages._record(entries, info.name))
    (distribution,) = packages.importlib.metadata.distributions(name="mcore-compat", path=[str(site)])
    wheel = packages._packed(distribution, tmp_path / "store")
    assert (wheel.name, wheel.version) == ("mcore-compat", "0.1.0")
    with zipfile.ZipFile(wheel.wheel) as archive:
        assert {name: archive.read(name) for name in entries} == entries
    assert packages._packed(distribution, tmp_path / "store").sha256 == wheel.sha256
    (site / "mcore_compat" / "__init__.py").write_text("x = 2\n", encoding="utf-8")
    with pytest.raises(InfrastructureError, match="changed"):
        packages._packed(distribution, tmp_path / "store")


def test_what_the_runner_needs_is_the_extra_of_the_harness():
    assert {item.partition(">")[0] for item in packages.suite_requirements()} == {
        "hypothesis", "pytest", "pytest-reportlog", "pytest-timeout", "pytest-xdist",
    }  # fmt: skip


def test_dependencies_make_another_environment_and_content_does_not():
    cell = build.cell()
    plain = recipe_of(cell, ()).identity
    own = recipe_of(cell, (), package()).identity
    edited = package(wheel=dataclasses.replace(package().wheel, sha256="ef" * 32))
    assert plain != own == recipe_of(cell, (), edited).identity
    assert own != recipe_of(cell, (), package(requires=("megatron-core<0.20",))).identity


def test_another_package_than_the_one_built_is_a_problem():
    facts = build.facts()
    assert problems(build.cell(), facts, build.LOCKED, "0.1.0") == ()
    (found,) = problems(build.cell(), facts, build.LOCKED, "0.1.0", package())
    assert found == "acme-rl is not installed, not 0.3.0"
    there = build.facts(distributions={"acme-rl": ("0.3.0",)}, tops={"megatron": ("acme-rl",)})
    assert problems(build.cell(), there, build.LOCKED, "0.1.0", package()) == ()
    assert problems(build.cell(), there, build.LOCKED, "0.1.0")


CONFLICT = """error: No solution found when resolving dependencies
  cause: Because acme-rl==0.3.0 depends on megatron-core<0.19 and only acme-rl==0.3.0 is available, we can conclude
      that all versions of acme-rl depend on megatron-core<0.19.
      {filler}
      And because you require megatron-core==0.19.2 and acme-rl, we can conclude that your requirements are
      unsatisfiable.
"""


class ConflictingUv:
    """Resolves nothing."""

    def call(self, arguments, *, cwd=None):
        if arguments[0] == "pip":
            (cwd / "asked").write_text(json.dumps([str(part) for part in arguments]), encoding="utf-8")
            raise UvFailure(CONFLICT.format(filler="And because of more than anybody reads. " * 20))
        return ""


def test_a_conflict_is_unresolvable_with_the_last_lines_of_the_resolver(tmp_path):
    wheel = ProjectWheel("mcore-compat", "0.1.0", "ab" * 32, None, Path("/store/harness/m.whl"))
    made = provision(build.cell("0.19.2"), (), wheel, tmp_path, ConflictingUv(), Path("python"), {}, package())
    assert made.verdict is Verdict.UNRESOLVABLE
    assert made.reason.endswith("you require megatron-core==0.19.2 and acme-rl, we can conclude that your requirements"
                                " are unsatisfiable")  # fmt: skip
    requirements = (tmp_path / "0.19.2" / "requirements.in").read_text(encoding="utf-8").splitlines()
    assert "acme-rl @ file:///store/acme_rl-0.3.0-py3-none-any.whl" in requirements
    asked = json.loads((tmp_path / "0.19.2" / "asked").read_text(encoding="utf-8"))
    assert asked[asked.index("--no-emit-package") + 1] == "acme-rl"


# The plugin.


def test_the_plugin_writes_the_facts_of_an_ordinary_suite(tmp_path):
    site = tmp_path / "site"
    (site / "megatron" / "core").mkdir(parents=True)
    (site / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.18.2'\n", encoding="utf-8")
    (site / "acme_rl.py").write_text("", encoding="utf-8")
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_x.py").write_text(
        "import megatron.core, acme_rl\ndef test_x():\n    pass\ndef test_y():\n    pass\n", encoding="utf-8"
    )
    source = Path(PLUGIN).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mcore_compat.run.pytest_plugin", "-p", "no:cacheprovider"]
    env = {
        "PYTHONPATH": f"{source}:{site}",
        "MCORE_COMPAT_CELL_OUT": str(tmp_path),
        "MCORE_COMPAT_PACKAGE": "acme_rl",
        "MCORE_COMPAT_PACKAGE_SOURCE": str(site),
    }
    subprocess.run([*command, suite], env=env, cwd=tmp_path, check=True, capture_output=True)
    facts = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))
    assert facts["complete"]
    assert facts["collected"] == ["suite/test_x.py::test_x", "suite/test_x.py::test_y"]
    assert facts["megatron_core"]["attribute"] == "0.18.2"
    (origins,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("origins-*.json"))
    assert origins["modules"]["acme_rl"] == 1
    assert list(origins["foreign"]) == ["megatron.core"], "an editable package may come from its folder"
    (tmp_path / "facts.json").unlink()
    subprocess.run(
        [*command, suite], env=env | {"MCORE_COMPAT_SUBJECT": "x"}, cwd=tmp_path, check=True, capture_output=True
    )
    assert not (tmp_path / "facts.json").exists(), "a fused forward's suite writes its own"
