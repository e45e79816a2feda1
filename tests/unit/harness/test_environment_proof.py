"""The proof of an environment: the true one passes, each fault is named."""

import base64
import hashlib
import subprocess
import venv

import harness_builders as build
import pytest

from mcore_compat.provision import probe
from mcore_compat.provision.verify import differences, problems
from mcore_compat.records import EnvironmentFacts


def found(cell=None, locked=None, **changes):
    return problems(cell or build.cell(), build.facts(**changes), locked or build.LOCKED, "0.1.0")


def test_the_true_environment_has_no_problem():
    assert found() == ()


FAULTS = {
    "another interpreter": ({"python": "3.11.9"}, "3.11.9"),
    "the user's site": ({"user_site": True}, "site-packages"),
    "torch replaced": ({"distributions": {"torch": ("2.12.0",)}}, "torch is 2.12.0, not 2.11.0"),
    "torch gone": ({"distributions": {"torch": ()}}, "torch is not installed"),
    "triton replaced": ({"distributions": {"triton": ("3.9.0",)}}, "triton is 3.9.0, but 3.6.0 was resolved"),
    "numpy too new": ({"distributions": {"numpy": ("2.5.0",)}}, "numpy<2.5"),
    "two versions over each other": ({"distributions": {"numpy": ("2.4.6", "1.26.4")}}, "more than once"),
    "no megatron": ({"distributions": {"megatron-core": ()}}, "not installed"),
    "wrong megatron": ({"distributions": {"megatron-core": ("0.17.1",)}}, "0.17.1 is installed, not 0.18.2"),
    "files changed": (
        {"megatron_files": build.files(changed=("megatron/core/x.py",), changed_count=1)},
        "megatron/core/x.py",
    ),
    "a second root": (
        {"megatron_roots": ("lib/python3.12/site-packages/megatron", "/src/Megatron-LM/megatron")},
        "2 roots",
    ),
    "only a foreign root": ({"megatron_roots": ("/src/Megatron-LM/megatron",)}, "1 roots"),
    "a foreign module": (
        {"imported": build.imported(foreign={"megatron.training": "/src/megatron/training/__init__.py"})},
        "megatron.training",
    ),
    "attribute disagrees": ({"imported": build.imported(attribute="0.19.1")}, "says that it is 0.19.1"),
    "another torch imported": (
        {"imported": build.imported(versions={"torch": "2.12.0"})},
        "torch says that it is 2.12.0",
    ),
    "no subject": ({"distributions": {"mcore-compat": ()}}, "subject is not installed"),
    "old subject": ({"distributions": {"mcore-compat": ("0.0.9",)}}, "subject is 0.0.9"),
    "a file of torch was edited": ({"changed": ("torch/functional.py",), "changed_count": 1}, "torch/functional.py"),
    "a stray module": ({"unowned": {"sitecustomize.py": "ab"}}, "no distribution owns sitecustomize.py"),
    "a stray start-up file": ({"unowned": {"zz_soften.pth": "ab"}}, "no distribution owns zz_soften.pth"),
    "a start-up module of a package": ({"startup": {"sitecustomize.py": "megatron-core"}}, "sitecustomize.py"),
    "a start-up package": ({"startup": {"usercustomize": "helper"}}, "usercustomize of helper"),
    "a start-up file of the candidate": ({"startup": {"zz.pth": "megatron-core"}}, "zz.pth of megatron-core"),
    "a candidate that adds to torch": ({"tops": {"megatron": (), "torch": ("torch",)}}, "brings `torch`"),
    "a plugin under the suite's own name": (
        {"plugins": {"megatron-core": ("timeout = mcore_ci",)}},
        "takes the name of the suite's own, timeout",
    ),
    "a plugin under a module's name": (
        {"plugins": {"megatron-core": ("pytest_reportlog.plugin = mcore_ci",)}},
        "pytest_reportlog.plugin",
    ),
    "edited subject": ({"subject_files": build.files(changed=("mcore_fused/patch.py",), changed_count=1)}, "patch.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    changes, words = FAULTS[fault]
    assert any(words in problem for problem in found(**changes))


def test_the_same_environment_has_no_difference():
    assert differences(build.facts(), build.facts(seconds=3.0, imported=None)) == ()


INTRUSIONS = {
    "another wheel of the same version": ({"files": build.facts().files | {"torch": "ef"}}, "files of torch"),
    "an added plugin": (
        {
            "distributions": {"pytest-rerunfailures": ("16.0",)},
            "files": build.facts().files | {"pytest-rerunfailures": "ef"},
        },
        "pytest-rerunfailures is 16.0, it was not installed",
    ),
    "a removed distribution": (
        {"files": {name: value for name, value in build.facts().files.items() if name != "triton"},
         "distributions": {"triton": ()}},
        "triton is not installed",
    ),
    "another version": ({"distributions": {"numpy": ("2.4.7",)}}, "numpy is 2.4.7, it was 2.4.6"),
    "a stray file": ({"unowned": {"conftest.py": "ef"}}, "conftest.py"),
    "a start-up file": ({"startup": {"a.pth": "x"}}, "start of the interpreter"),
    "system packages switched on": ({"settings": "ef"}, "settings"),
    "a longer path": ({"path": ("/somewhere",)}, "module path"),
    "another interpreter": ({"python": "3.12.2"}, "3.12.2"),
}  # fmt: skip


@pytest.mark.parametrize("name", INTRUSIONS)
def test_what_was_done_to_an_environment_is_named(name):
    changes, words = INTRUSIONS[name]
    (difference,) = differences(build.facts(), build.facts(**changes))
    assert words in difference


def test_a_new_wheel_of_the_subject_is_no_difference():
    newer = build.facts(files=build.facts().files | {"mcore-compat": "ef"}, subject_files=build.files(sha256="ef"))
    assert differences(build.facts(), newer, {"mcore-compat"}) == ()
    assert differences(build.facts(), newer) == ("files of mcore-compat were changed",)


@pytest.fixture
def site(tmp_path):
    """A real environment with one small distribution in it, and its probe."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    put(packages, "megatron_core", {"megatron/core/__init__.py": b"x = 1\n", "megatron/core/data.bin": b"0" * 9})
    return packages


def put(packages, name, files, entry_points=""):
    """Install files as a distribution, RECORD included."""
    info = f"{name}-1.0.dist-info"
    every = files | {f"{info}/METADATA": f"Name: {name}\nVersion: 1.0\n".encode()}
    every |= {f"{info}/entry_points.txt": entry_points.encode()} if entry_points else {}
    rows = []
    for path, data in every.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    (packages / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]), encoding="utf-8")


def probed(packages):
    python = packages.parents[2] / "bin" / "python"
    done = subprocess.run([python, "-I", "-B", probe.__file__], check=True, capture_output=True, text=True)
    return EnvironmentFacts.model_validate_json(done.stdout.strip().splitlines()[-1])


def test_the_probe_of_an_untouched_environment(site):
    facts = probed(site)
    assert (facts.changed, facts.unowned, facts.startup) == ((), {}, {})
    assert facts.tops == {"megatron": ()}
    assert facts.files.keys() == {"megatron-core"}
    assert facts.megatron_files.count == 2
    assert differences(facts, probed(site)) == ()


@pytest.mark.parametrize(
    "path", ["sitecustomize.py", "zz.pth", "conftest.py", "megatron/core/extra.py", "megatron/core/__init__.pyc"]
)
def test_a_file_that_no_record_names_is_seen(site, path):
    before = probed(site)
    (site / path).write_text("import sys\n", encoding="utf-8")
    after = probed(site)
    assert path in after.unowned
    assert any(path in difference for difference in differences(before, after))


def test_bytecode_beside_its_source_is_not_counted(site):
    (site / "megatron" / "core" / "__pycache__").mkdir()
    (site / "megatron" / "core" / "__pycache__" / "x.cpython-312.pyc").write_bytes(b"x")
    assert probed(site).unowned == {}


def test_an_edited_file_is_seen_against_its_record_and_with_another_record(site):
    before = probed(site)
    (site / "megatron" / "core" / "__init__.py").write_bytes(b"x = 2\n")
    assert probed(site).changed == ("megatron/core/__init__.py",)
    put(site, "megatron_core", {"megatron/core/__init__.py": b"x = 2\n", "megatron/core/data.bin": b"0" * 9})
    after = probed(site)
    assert after.changed == ()
    assert differences(before, after) == ("files of megatron-core were changed",)


def test_a_plugin_and_a_shared_name_are_seen(site):
    put(site, "helper", {"helper/__init__.py": b"", "megatron/other.py": b""}, "[pytest11]\nsoften = helper\n")
    facts = probed(site)
    assert facts.plugins == {"helper": ("soften = helper",)}
    assert facts.tops == {"megatron": ("helper",)}


def test_a_source_build_may_call_itself_what_it_likes():
    candidate = build.cell(source="git+file:///x@main", megatron_core="main")
    changes = {
        "distributions": {"megatron-core": ("0.20.0",)},
        "imported": build.imported(attribute="0.20.0+1d78d85"),
    }
    assert found(candidate, **changes) == ()
