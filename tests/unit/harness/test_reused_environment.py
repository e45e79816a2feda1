"""An environment is reused only as it was verified: what differs is named, and it is made again."""

import dataclasses
from pathlib import Path

import harness_builders as build
import pytest

from mcore_compat.provision import uv_environment
from mcore_compat.provision.uv_environment import provision
from mcore_compat.records import ProjectWheel
from mcore_compat.verdicts import Verdict

WHEEL = ProjectWheel("mcore-compat", "0.1.0", "ab" * 32, None, Path("x.whl"))
NEWER = dataclasses.replace(WHEEL, sha256="cd" * 32)


class Host:
    """An installer and a probe in place of real ones; what is installed is a value."""

    def __init__(self, folder):
        self.folder = folder
        self.installed = build.facts()
        self.made = self.subjects = 0
        self.fail_subject = False

    def call(self, arguments, **_options):
        if arguments[0] == "venv":
            self.made += 1
            (self.folder / "0.18.2" / "lock.txt").write_text("torch==2.11.0\n", encoding="utf-8")
            self.installed = build.facts()
        elif "--reinstall" in arguments:
            self.subjects += 1
            if self.fail_subject:
                raise KeyboardInterrupt
        return ""

    def probed(self, _cell, _folder, _host, *, deep):
        facts = self.installed
        return facts if deep else facts.model_copy(update={"imported": None})

    def provision(self, wheel=WHEEL):
        return provision(build.cell(), (), wheel, self.folder, self, Path("python"), {})


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setattr(uv_environment, "_probed", made.probed)
    assert made.provision().environment.reused is False
    return made


def test_the_same_environment_is_reused(host):
    environment = host.provision().environment
    assert (environment.reused, environment.remade, host.made) == (True, "", 1)
    assert environment.facts.imported is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": build.facts().files | {"torch": "ef"}}, "files of torch were changed"),
        ({"files": build.facts().files | {"mcore-compat": "ef"}}, "files of mcore-compat were changed"),
        ({"unowned": {"sitecustomize.py": "ef"}}, "no distribution owns sitecustomize.py"),
        ({"changed": ("torch/functional.py",), "changed_count": 1}, "torch/functional.py"),
        ({"distributions": {"torch": ("2.12.0",)}}, "torch is 2.12.0"),
    ],
)
def test_a_changed_environment_is_made_again_and_told(host, changes, words):
    host.installed = build.facts(**changes)
    environment = host.provision().environment
    assert (environment.reused, host.made) == (False, 2)
    assert words in environment.remade
    assert host.provision().environment.reused


@pytest.mark.parametrize("text", ["torch==2.12.0\n", None])
def test_a_changed_lock_is_made_again(host, text):
    lock = host.folder / "0.18.2" / "lock.txt"
    lock.unlink() if text is None else lock.write_text(text, encoding="utf-8")
    assert "lock.txt" in host.provision().environment.remade


def test_a_newer_wheel_is_installed_into_the_same_environment(host):
    host.installed = build.facts(files=build.facts().files | {"mcore-compat": "ef"})
    environment = host.provision(NEWER).environment
    assert (environment.reused, host.made, host.subjects) == (True, 1, 2)
    assert host.provision(NEWER).environment.reused


def test_a_subject_whose_install_was_interrupted_is_not_believed(host):
    """The next run has the first wheel again: its digest is the remembered one, what is installed is not."""
    host.fail_subject = True
    with pytest.raises(KeyboardInterrupt):
        host.provision(NEWER)
    host.fail_subject = False
    assert host.provision(WHEEL).environment.reused is False


def test_an_environment_whose_interpreter_fails_is_made_again(host, monkeypatch):
    def fails(_cell, _folder, _host, *, deep):
        if not deep:
            raise uv_environment._Refused(Verdict.INFRA, "the interpreter fails in the environment: x", "look")
        return build.facts()

    monkeypatch.setattr(uv_environment, "_probed", fails)
    assert "the interpreter fails" in host.provision().environment.remade


def test_what_cannot_be_verified_when_new_is_refused(host, monkeypatch):
    facts = build.facts(startup={"sitecustomize.py": "megatron-core"})
    monkeypatch.setattr(uv_environment, "_probed", lambda *_args, **_options: facts)
    made = host.provision()
    assert (made.environment, made.verdict) == (None, Verdict.INFRA)
    assert "sitecustomize.py of megatron-core" in made.reason
