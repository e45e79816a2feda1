"""A published package as the subject: pinned, refused where it cannot run, seen to be imported, named in the report."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path
from types import MappingProxyType

import harness_builders as build
import pytest
from typer.testing import CliRunner

from mcore_compat.cli import bundle as bundle_cli
from mcore_compat.cli import gate as gate_cli
from mcore_compat.cli import gpu as gpu_cli
from mcore_compat.cli import main as cli
from mcore_compat.cli import run as run_cli
from mcore_compat.errors import UsageError
from mcore_compat.judge.cell import judge_cell
from mcore_compat.pipeline.lanes import ImageLane, IndexLane
from mcore_compat.project import Project
from mcore_compat.provision import bundle
from mcore_compat.provision import host_image as image
from mcore_compat.provision.host_image import Image, link_farm, provision_in_image
from mcore_compat.provision.wheelhouse import Wheel, Wheelhouse, WheelhouseError, peer_wheel
from mcore_compat.records import ProjectWheel
from mcore_compat.report import markdown
from mcore_compat.subjects import selection as chosen_subject
from mcore_compat.subjects.published import PEERS, PEERS_FOLDER
from mcore_compat.subjects.selection import choose_subject
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]
VERL = PEERS["verl"]


def _wheel(folder, name, version="1.0", members=()):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "x = 1\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/RECORD", "")
        for member in members:
            archive.writestr(member, "")
    return path


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A small package in verl's place, with its wheel in a bundle."""
    path = _wheel(tmp_path / "bundle" / PEERS_FOLDER, "verl", "9.9")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    small = dataclasses.replace(VERL, version="9.9", filename=path.name, sha256=digest)
    for module in (bundle_cli, chosen_subject):
        monkeypatch.setattr(module, "PEERS", MappingProxyType({"verl": small}))
    return small


def test_the_pin_is_one_file():
    assert VERL.filename == f"verl-{VERL.version}-py3-none-any.whl"
    assert VERL.requirement == f"verl=={VERL.version} --hash=sha256:{VERL.sha256}"
    assert len(bytes.fromhex(VERL.sha256)) == 32


def test_it_is_chosen_by_name_on_the_gpu_lane_only():
    chosen = choose_subject("verl", "gpu")
    assert (chosen.name, chosen.variable, chosen.peer, chosen.is_ours) == ("verl", "verl", VERL, False)
    assert VERL.sha256 in chosen.digest
    with pytest.raises(UsageError) as refused:
        choose_subject("verl")
    assert refused.value.problem.count(".") == 1, "one sentence"
    assert "needs a GPU" in refused.value.problem
    assert "ci/gpu --subject verl" in refused.value.next_step


@pytest.mark.parametrize("command", [["run"], ["gate", "megatron-core==0.19.2"]])
def test_the_cpu_commands_refuse_it_before_anything_is_made(command, monkeypatch):
    def never(*_arguments, **_options):
        raise AssertionError("something was prepared")

    monkeypatch.setattr(run_cli, "prepare", never)
    monkeypatch.setattr(gate_cli, "read_sides", never)
    result = CliRunner().invoke(cli.app, [*command, "--subject", "verl"])
    assert isinstance(result.exception, UsageError)
    assert "needs a GPU" in str(result.exception)


@pytest.mark.parametrize(
    "more",
    [["--fault", "bf16-logits"], ["--nproc", "2"], ["--write-inventory"]],
    ids=lambda more: more[0],
)
def test_what_judges_ours_only_refuses_another(more):
    result = CliRunner().invoke(cli.app, ["gpu", "run", *more, "--subject", "verl"])
    assert isinstance(result.exception, UsageError)
    assert "judges mcore_fused only" in str(result.exception)
    assert gpu_cli.choose_for_gpu("mcore_fused", [more[0]]).is_ours


def test_a_host_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_cli, "read_image", lambda: Image((), {}, "", ()))
    monkeypatch.setattr(gpu_cli, "prepare", lambda *_, **__: pytest.fail("a cell was made"))
    house = Wheelhouse(tmp_path, "3.12", "x86_64", (), (), {})
    house.write()
    monkeypatch.setattr(Wheelhouse, "check_host", lambda *_: None)
    asked = ["--subject", "verl", "--select", "0.18.2", "--bundle", str(tmp_path), "--root", str(ROOT)]
    result = CliRunner().invoke(cli.app, ["gpu", "run", *asked])
    assert isinstance(result.exception, UsageError)
    assert "needs a GPU" in str(result.exception)


def test_a_missing_or_another_wheel_is_refused(peer, tmp_path):
    folder = tmp_path / "bundle"
    assert peer_wheel(folder, peer) == folder / PEERS_FOLDER / peer.filename
    (folder / PEERS_FOLDER / peer.filename).write_bytes(b"another")
    with pytest.raises(WheelhouseError, match="is not the verl that is judged") as refused:
        peer_wheel(folder, peer)
    assert "ci/bundle --subject verl" in refused.value.next_step
    with pytest.raises(WheelhouseError, match="has no peers/"):
        peer_wheel(tmp_path, peer)


class _Uv:
    """Answers a download with a file of the caller's choice."""

    def __init__(self, content):
        self.content, self.locks = content, []

    def call(self, arguments, **_):
        words = [str(argument) for argument in arguments]
        lock, target = words[words.index("-r") + 1], words[words.index("-d") + 1]
        assert {"--no-deps", "--require-hashes"} <= set(words)
        self.locks.append(Path(lock).read_text(encoding="utf-8"))
        Path(target, VERL.filename.replace(VERL.version, "9.9")).write_bytes(self.content)


def test_the_bundle_fetches_it_once_by_its_hash(peer, tmp_path):
    right = (tmp_path / "bundle" / PEERS_FOLDER / peer.filename).read_bytes()
    uv = _Uv(right)
    for _ in range(2):
        fetched = bundle.fetch_peer(tmp_path / "other", peer, "3.12", uv)
    assert fetched.read_bytes() == right
    assert uv.locks == [f"{peer.requirement}\n"]
    with pytest.raises(WheelhouseError):
        bundle.fetch_peer(tmp_path / "third", peer, "3.12", _Uv(b"another"))


def _provisioned(tmp_path, monkeypatch, peer, installed):
    """An environment of one cell, its proof pretended: what is looked at is what was unpacked."""
    megatron = _wheel(tmp_path / "bundle", "megatron_core", "0.18.2")
    house = Wheelhouse(
        tmp_path / "bundle", "3.12", "x86_64", (), (), {"megatron-core==0.18.2": (Wheel.of(megatron, ""),)}
    )
    own = _wheel(tmp_path / "own", "mcore_compat", "0.1.0")
    subject = ProjectWheel(name="mcore-compat", version="0.1.0", sha256="", commit=None, wheel=own)
    facts = build.facts()
    facts = facts.model_copy(update={"distributions": {**facts.distributions, "verl": installed}})
    monkeypatch.setattr(image, "_probed", lambda *_: facts)
    monkeypatch.setattr(image, "problems", lambda *_: ())
    return provision_in_image(build.cell(), house, tmp_path, subject, tmp_path / "cells", {}, peer)


def test_the_cell_has_the_package_and_proves_its_version(peer, tmp_path, monkeypatch):
    made = _provisioned(tmp_path, monkeypatch, peer, ("9.9",))
    assert made.environment is not None, made.reason
    (site,) = (made.environment.home.parent / "venv" / "lib").glob("python3*/site-packages")
    assert (site / "verl" / "__init__.py").is_file()
    assert f"{peer.filename} --hash=sha256:{peer.sha256}" in made.environment.lock


@pytest.mark.parametrize(("installed", "said"), [((), "not there"), (("0.1",), "verl is 0.1, not 9.9")])
def test_a_cell_with_another_version_proves_nothing(peer, tmp_path, monkeypatch, installed, said):
    made = _provisioned(tmp_path, monkeypatch, peer, installed)
    assert (made.environment, made.verdict) == (None, Verdict.INFRA)
    assert said in made.reason


def test_the_image_s_own_copy_is_not_lent(tmp_path):
    site = tmp_path / "site-packages"
    for name in ("verl", "verl-0.1.dist-info", "einops"):
        (site / name).mkdir(parents=True)
    house = Wheelhouse(tmp_path, "3.12", "x86_64", (), (), {})
    picture = Image((site,), {}, "", ())
    assert {entry.name for entry in link_farm(picture, house, tmp_path / "farm", VERL).iterdir()} == {"einops"}
    assert {entry.name for entry in link_farm(picture, house, tmp_path / "farm").iterdir()} >= {"verl"}


def _judged(**modules):
    origins = (build.origins(modules={"megatron": 190, "torch": 900, **modules}),)
    said = {"subject": "verl", "capabilities": ["call", "patch", "mode", "evidence"]}
    run = build.suite_run(facts=build.suite_facts(**said), origins=origins)
    return judge_cell(
        build.cell(), build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY,
        subject=choose_subject("verl", "gpu"),
    )  # fmt: skip


def test_the_package_must_have_been_imported():
    assert _judged(verl=26).verdict is Verdict.OK
    result = _judged(verl=0)
    assert result.verdict is Verdict.UNPROVEN
    assert "no process of the suite imported a module of verl" in result.reason


def test_the_report_names_the_package_and_its_hash():
    plain = build.report(build.result())
    told = {"judged": "verl", "judged_version": VERL.version, "judged_sha256": VERL.sha256}
    report = plain.model_copy(update={"subject": plain.subject.model_copy(update=told)})
    assert f"Subject: verl {VERL.version}, judged by mcore-compat 0.1.0" in markdown.render(report)
    assert VERL.sha256 in report.model_dump_json()


def test_the_way_back_names_the_subject(tmp_path):
    house = Wheelhouse(tmp_path, "3.12", "x86_64", (), (), {})
    wheel = ProjectWheel(name="mcore-compat", version="0.1.0", sha256="", commit=None, wheel=tmp_path)
    lane = ImageLane(
        Project.at(ROOT), Image((), {}, "", ()), house, tmp_path, wheel, tmp_path, {}, choose_subject("verl", "gpu")
    )
    assert "`ci/gpu --select 0.18.2 --subject verl`" in lane.rerun(build.cell(), "a.py::test_b")


def test_a_version_and_a_checkout_are_judged_in_cpu_cells(tmp_path):
    chosen = choose_subject("verl==0.8.0")
    assert (chosen.variable, chosen.peer.version, chosen.peer.source) == ("verl", "0.8.0", "verl==0.8.0")
    assert "kernel replaced by torch" in chosen.name
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    checkout = choose_subject(f"verl@{tmp_path}")
    assert (checkout.peer.source, checkout.peer.checkout) == ("", tmp_path)
    assert checkout.digest != chosen.digest


@pytest.mark.parametrize(
    ("text", "words"),
    [("verl==new", "not a version"), ("verl@nowhere", "not a checkout"), ("slime==0.1", "no subject")],
)
def test_other_versions_and_checkouts_are_refused(text, words):
    with pytest.raises(UsageError, match=words):
        choose_subject(text)


def test_a_gpu_host_judges_the_pinned_version_alone():
    assert choose_subject(f"verl=={VERL.version}", "gpu").peer is VERL
    with pytest.raises(UsageError, match="whose wheel is pinned"):
        choose_subject("verl==0.8.0", "gpu")


def test_every_cell_gets_the_version_without_its_dependencies(tmp_path):
    chosen = choose_subject("verl==0.8.0")
    lane = IndexLane(Project.at(tmp_path), (), _Interpreters(), None, {}, chosen, peer=chosen.peer.source)
    (adapted,) = lane.adapted([build.cell()])
    assert [item.spec for item in adapted.without_dependencies] == ["verl==0.8.0"]


class _Interpreters:
    def interpreter(self, version):
        return Path(version)
