"""The megatron-core of one interpreter: what is found there, who it is nearest to, and the verdict of all ranks."""

import json
import os
import sys
from pathlib import Path

import pytest

from mcore_compat.contract.model import Contract, Direction, Item, VersionLabels
from mcore_compat.errors import InfrastructureError, UsageError
from mcore_compat.gate import here as places
from mcore_compat.gate import here_report as reports
from mcore_compat.provision import here_probe
from mcore_compat.results import CellResult, MegatronCore
from mcore_compat.verdicts import Verdict


def contract(name, **values):
    items = [Item(key, Direction.CALL, value, f"megatron/core/{key}.py:3") for key, value in values.items()]
    return Contract.of(name, VersionLabels(name, name), items)


@pytest.fixture
def interpreter(tmp_path):
    """This interpreter with a pretended megatron on its path."""
    package = tmp_path / "image" / "megatron" / "core"
    (package / "models" / "gpt").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.18.2+site.3'\n", encoding="utf-8")
    for name in ("models/__init__.py", "models/gpt/__init__.py", "models/gpt/gpt_model.py"):
        (package / name).write_text("", encoding="utf-8")
    return tmp_path / "image"


def look(tmp_path, path, **variables):
    host = {"PATH": os.environ["PATH"], "PYTHONPATH": str(path), **variables}
    cell = places.cell_of_here(host, places.plugin_folder(tmp_path / "plugin"), None, 60)
    return places.look_here(Path(sys.executable), cell, tmp_path, host), cell


def test_what_is_installed_here_is_found_where_it_is(tmp_path, interpreter):
    seen, cell = look(tmp_path, interpreter)
    assert seen.source == str(interpreter.resolve())
    assert (seen.attribute, seen.origin, seen.error) == ("0.18.2+site.3", "outside: __init__.py", "")
    assert seen.missing == ()
    assert "mcore_compat" in {path.name for path in (tmp_path / "plugin").iterdir()}
    assert {path.name for path in (tmp_path / "plugin").iterdir()} <= {"mcore_compat", "mcore_fused"}
    assert cell.builds_megatron, "its version is a label"


def test_only_what_a_launcher_needs_reaches_the_suite(tmp_path):
    host = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "secret",
        "SLURM_JOB_ID": "7",
        "HOME": "/h",
    }
    cell = places.cell_of_here(host, tmp_path, tmp_path / "tools", 60)
    names = {variable.name for variable in cell.env}
    assert names == {"NCCL_DEBUG", "PYTHONPATH", "RANK", "SLURM_JOB_ID", "WORLD_SIZE"}
    (path,) = [variable.value for variable in cell.env if variable.name == "PYTHONPATH"]
    assert path.split(os.pathsep) == [str(tmp_path), str(tmp_path / "tools")]


def test_an_interpreter_without_megatron_says_so(tmp_path):
    with pytest.raises(InfrastructureError, match="no megatron-core") as caught:
        look(tmp_path, tmp_path)
    assert "--python" in caught.value.next_step


def test_a_megatron_that_cannot_be_imported_is_no_verdict_about_the_suite(tmp_path, interpreter):
    (interpreter / "megatron" / "core" / "__init__.py").write_text("import missing_extension\n", encoding="utf-8")
    with pytest.raises(InfrastructureError, match="missing_extension"):
        look(tmp_path, interpreter)


def test_an_interpreter_without_pytest_is_told_what_to_bring(tmp_path, interpreter, monkeypatch):
    monkeypatch.setattr(places, "_TOOLS", ("pytest", "no_such_plugin"))
    with pytest.raises(InfrastructureError, match="has no no_such_plugin") as caught:
        look(tmp_path, interpreter)
    assert "--tools" in caught.value.next_step


def test_something_that_is_no_python_says_so(tmp_path):
    cell = places.cell_of_here({}, tmp_path, None, 60)
    with pytest.raises(InfrastructureError, match="cannot be asked"):
        places.look_here(Path("/bin/false"), cell, tmp_path, {"PATH": "/bin"})


def test_files_that_differ_from_what_was_installed_are_named(tmp_path, monkeypatch):
    site = tmp_path / "site"
    info = site / "megatron_core-0.18.2.dist-info"
    info.mkdir(parents=True)
    (site / "megatron").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.18.2\n", encoding="utf-8")
    digest = here_probe.base64.urlsafe_b64encode(here_probe.hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(
        "".join(f"megatron/{name}.py,sha256={digest},6\n" for name in ("a", "b", "c")), encoding="utf-8"
    )
    (site / "megatron" / "a.py").write_text("x = 1\n", encoding="utf-8")
    (site / "megatron" / "b.py").write_text("x = 2\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert here_probe._changed() == ["megatron/b.py", "megatron/c.py (missing)"]


def test_local_edits_are_named_by_symbol_against_the_nearest_release(monkeypatch):
    snapshots = {
        "0.17.1": contract("0.17.1", one=1, two=2, three=3, four=4),
        "0.18.2": contract("0.18.2", one=1, two=5, three=6, four=7),
    }
    monkeypatch.setattr(places, "read_directory", lambda path: path)
    monkeypatch.setattr(places, "extract", lambda *_: contract("here", one=1, two=5, three=8, five=9))
    found = places.nearest_to(Path("anywhere"), snapshots, ())
    assert found.nearest == "0.18.2"
    assert [(edit.symbol, edit.kind, edit.where) for edit in found.edits] == [
        ("five", "added", "megatron/core/five.py:3"),
        ("four", "removed", "megatron/core/four.py:3"),
        ("three", "changed", "megatron/core/three.py:3"),
    ]


# Ranks.


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "1"}, (0, 1)),
    ],
)
def test_the_launcher_says_which_rank_this_is(host, place):
    found = reports.rank_of(host)
    assert (found.rank, found.size) == place


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("x", "2")])
def test_a_rank_that_cannot_be_is_refused(rank, size):
    with pytest.raises(UsageError, match="not a rank"):
        reports.rank_of({"RANK": rank, "WORLD_SIZE": size})


def report(rank=0, verdict=Verdict.OK, *, size=2, started=1000.0, **changes):
    cell = CellResult(
        id="0.18.2", megatron_core=MegatronCore(requested="0.18.2"), contract_class="x", lane="cpu", verdict=verdict
    )
    fields = {
        "verdict": verdict, "reason": "" if verdict.green else "a check failed", "started": started, "python": "3.12.1",
        "versions": {"torch": "2.11.0"}, "attribute": "0.18.2", "nearest": "0.18.2", "suite": "compat", "rank": rank,
        "world_size": size, "cells": (cell,),
    }  # fmt: skip
    return reports.HereReport.model_validate(fields | changes)


def test_all_ranks_make_one_verdict():
    whole = reports.joined(report(), report)
    assert (whole.verdict, whole.reason, len(whole.cells)) == (Verdict.OK, "", 2)


def test_one_rank_that_fails_is_enough():
    whole = reports.joined(report(), lambda rank: report(rank, Verdict.BREAK))
    assert (whole.verdict, whole.reason) == (Verdict.BREAK, "rank 1: a check failed")


def test_a_rank_that_left_nothing_is_never_passed_over():
    whole = reports.joined(report(size=3), lambda _: None)
    assert (whole.verdict, whole.reason) == (Verdict.UNPROVEN, "rank 1 left no result, nor did 1 more")
    assert [cell is None for cell in whole.cells] == [False, True, True]
    assert "rank 2: no result" in reports.text_of(whole)


def test_ranks_with_other_packages_are_no_verdict():
    whole = reports.joined(report(), lambda rank: report(rank, versions={"torch": "2.10.0"}))
    assert (whole.verdict, whole.reason) == (Verdict.INFRA, "rank 1 has other packages than rank 0")


def test_what_an_earlier_run_left_is_not_taken_for_a_rank_of_this_one(tmp_path):
    out, first = tmp_path / "v.json", report(started=5000.0)
    reports.write(report(1, started=1000.0), reports.part_of(out, 1))
    assert reports.waiting_for(out, first, 0.0)(1) is None
    reports.write(report(1, started=4990.0), reports.part_of(out, 1))
    assert reports.waiting_for(out, first, 0.0)(1).started == 4990.0
    assert json.loads(reports.part_of(out, 1).read_text(encoding="utf-8"))["rank"] == 1


def test_a_source_that_was_only_read_is_never_green(tmp_path):
    seen = places.Here(python="3.12.1", prefix="/", path=(), megatron=("/m",), distributions={}, origin="x")
    found = places.Found(contract("here", one=1), "0.18.2", ())
    made = reports.report_of(seen, found, None, "", reports.Place(), 1.0)
    assert made.verdict is Verdict.UNPROVEN
    assert "no local edits against 0.18.2" in reports.text_of(made)
