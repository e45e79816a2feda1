"""The gate of the GPU lane: which wheels both sides get, what is refused, and what GPU cells alone may say."""

from __future__ import annotations

import contextlib
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_builders import RAN, FakeLane, cell, side
from typer.testing import CliRunner

from mcore_compat.cli import main as cli
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.errors import UsageError
from mcore_compat.gate import run as gate_run
from mcore_compat.gate.decide import decide
from mcore_compat.gate.model import GateFinding, Tier
from mcore_compat.gate.run import run_gate
from mcore_compat.gate.sides import paired_cells, read_sides
from mcore_compat.gate.steps import carried, image_steps, index_steps
from mcore_compat.gate.witness import Outcome
from mcore_compat.pipeline.session import RunOptions
from mcore_compat.project import Project
from mcore_compat.provision.wheelhouse import Wheel, Wheelhouse, WheelhouseError
from mcore_compat.results import Report, SubjectInfo
from mcore_compat.subjects.selection import choose_subject
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]
CONTRACTS = load_snapshots(ROOT / "compat_matrix" / "contracts")


def _wheel(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("megatron/core/__init__.py", content)
    return folder / name


def _house(folder: Path) -> Wheelhouse:
    names = {version: f"megatron_core-{version}-cp312-cp312-linux_x86_64.whl" for version in ("0.18.2", "0.19.2")}
    wheels = {version: Wheel.of(_wheel(folder, name, version), "index") for version, name in names.items()}
    need = Wheel.of(_wheel(folder, "extra-1-py3-none-any.whl", "extra"), "index")
    cells = {f"megatron-core=={version}": (wheel, need) for version, wheel in wheels.items()}
    return Wheelhouse(folder, "3.12", "x86_64", (), (), cells)


def _sides(candidate: str = "0.19.2"):
    return read_sides(Project.at(ROOT), candidate, "0.18.2", ())


def _given(tmp_path: Path):
    """A wheel of the caller's that has the bundle's own file name and other content."""
    path = _wheel(tmp_path / "given", "megatron_core-0.19.2-cp312-cp312-linux_x86_64.whl", "doctored")
    sides = _sides()
    return path, SimpleNamespace(
        **{name: getattr(sides, name) for name in ("matrix", "snapshots", "baseline", "old", "new", "nearest")},
        candidate=parse_candidate(str(path)),
    )


def test_a_wheel_of_the_caller_is_installed_in_place_of_the_bundle_s(tmp_path):
    path, sides = _given(tmp_path)
    before, after = paired_cells(sides)
    assert (before.id, after.id) == ("0.18.2", "candidate")
    house = carried(_house(tmp_path / "bundle"), sides, (before, after))
    wheels = house.cells[after.megatron_requirement]
    assert [wheel.origin for wheel in wheels] == ["given", "index"], "what the nearest release needs comes along"
    house.unpack(wheels[:1], tmp_path / "site")
    assert (tmp_path / "site" / "megatron" / "core" / "__init__.py").read_text() == "doctored"
    house.unpack(house.cells["megatron-core==0.19.2"][:1], tmp_path / "other")
    assert (tmp_path / "other" / "megatron" / "core" / "__init__.py").read_text() == "0.19.2"
    path.write_bytes(b"changed meanwhile")
    with pytest.raises(WheelhouseError, match="not the file"):
        house.unpack(wheels[:1], tmp_path / "third")


@pytest.mark.parametrize(
    ("candidate", "step"), [("0.18.0", "Make the bundle with it"), ("git+https://host/x/y@main", "uv build --wheel")]
)
def test_what_would_have_to_be_fetched_or_built_is_refused(tmp_path, candidate, step):
    _, sides = _given(tmp_path)
    sides.candidate = parse_candidate(candidate)
    with pytest.raises(UsageError, match="is not in the bundle") as raised:
        carried(_house(tmp_path / "bundle"), sides, paired_cells(sides))
    assert step in raised.value.next_step


def _report(*results):
    subject = SubjectInfo(name="s", version="1", sha256="0")
    return Report(
        run_id="r", started="x", seconds=1, verdict=Verdict.OK, suite_sha256="0", profile="gpu", subject=subject,
        planned=tuple(result.id for result in results), cells=results,
    )  # fmt: skip


def _judged(monkeypatch, tmp_path, *runs, rerun=True):
    asked, left = [], list(runs)

    def run_session(session, display):
        asked.append(tuple(cell.id for cell in session.cells))
        assert session.project.suite == ROOT / "tests" / "gpu"
        return _report(*left.pop(0))

    monkeypatch.setattr(gate_run, "run_witnesses", lambda lines, *_: [Outcome("pass") for _ in lines])
    project = replace(Project.at(ROOT), reports=tmp_path / "reports")
    sides, house = _sides(), _house(tmp_path / "bundle")
    cpu, gpu = image_steps(project, sides, RunOptions(), house, tmp_path, {}, limit_s=60, commit=None)
    steps = (cpu, replace(gpu, open_lane=lambda: FakeLane(tmp_path)))
    show = lambda _: contextlib.nullcontext(SimpleNamespace(phase=lambda *_: None))  # noqa: E731
    return run_gate(sides, steps, show, {}, rerun=rerun, run_session=run_session).gate, asked


def test_both_green_on_the_gpu_says_that_the_cpu_cells_are_another_s(monkeypatch, tmp_path):
    gate, asked = _judged(monkeypatch, tmp_path, (cell("0.18.2"), cell("0.19.2")))
    assert asked == [("0.18.2", "0.19.2")]
    # Both are green; bodies that the library stands in for changed between these two releases.
    assert gate.verdict is Verdict.DRIFT
    assert gate.reason.startswith("upstream's surface changed and behaviour is equal: upstream changed replaced.")
    assert "GPU cells only" in gate.reason
    assert {tier.name: tier.ran for tier in gate.tiers} == {"static": True, "cpu": False, "witness": True, "gpu": True}


def test_a_failure_on_the_gpu_is_run_again_and_breaks(monkeypatch, tmp_path):
    run = (cell("0.18.2"), cell("0.19.2", failures={"a.py::t": "wrong numbers"}))
    gate, asked = _judged(monkeypatch, tmp_path, run, run)
    assert (len(asked), gate.verdict) == (2, Verdict.BREAK)
    gate, asked = _judged(monkeypatch, tmp_path, run, rerun=False)
    assert (len(asked), gate.verdict) == (1, Verdict.BREAK)


def test_what_neither_side_has_shown_is_not_green():
    """On a host without a GPU both sides rehearse, and agree: that is no proof."""
    both = GateFinding(origin="cell", title="no-evidence", state="same", level="unproven", message="ran on the CPU")
    tiers = (Tier(name="static", ran=True), Tier(name="gpu", ran=True))
    verdict, reason = decide(side("old", cell("old")), side("new", cell("new")), tiers, [both])
    assert verdict is Verdict.UNPROVEN
    assert reason == "nothing is new, but neither side is proved: no-evidence: ran on the CPU"
    assert decide(side("old", cell("old")), side("new", cell("new")), RAN, [])[0] is Verdict.OK


def test_the_gpu_step_of_a_host_with_a_network_runs_the_gpu_suite():
    options = RunOptions(workers=2)
    cpu, gpu = index_steps(Project.at(ROOT), _sides(), options, {}, has_gpu=True)
    assert (cpu.project, cpu.options) == (Project.at(ROOT), options)
    assert (gpu.project.suite, gpu.project.inventory.name) == (ROOT / "tests" / "gpu", "inventory-gpu.toml")
    assert (gpu.options.profile, gpu.options.workers) == ("gpu", 0)
    assert [cell.id for cell in gpu.cells] == ["0.18.2-gpu", "0.19.2-gpu"]
    assert {cell.lane for cell in gpu.cells} == {"gpu"}
    assert gpu.open_lane is not None
    assert gpu.project.suite.is_dir()
    assert gpu.project.inventory.is_file()


def test_why_there_is_no_gpu_step_is_said():
    assert index_steps(Project.at(ROOT), _sides(), RunOptions(), {}, has_gpu=False)[1].note == "this host has no GPU"
    other = RunOptions(subject=choose_subject("stock"))
    gpu = index_steps(Project.at(ROOT), _sides(), other, {}, has_gpu=True)[1]
    assert (gpu.open_lane, "own library only" in gpu.note) == (None, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gates", "0.19.2"], "No such command"),
        (["gate"], "Missing argument"),
        (["gate", "0.19.2", "0.18.2"], "unexpected extra argument"),
        (["gate", "0.19.2", "--select", "0.18.*"], "No such option"),
        (["gate", "0.19.2", "--fault", "bf16-logits"], "No such option"),
        (["run", "--baseline", "0.18.2"], "No such option"),
    ],
)
def test_a_command_line_that_means_nothing_is_refused_first(arguments, words):
    result = CliRunner().invoke(cli.app, ["gpu", *arguments], color=False, env={"TERM": "dumb", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in re.sub(r"\x1b\[[0-9;]*m", "", result.output)
