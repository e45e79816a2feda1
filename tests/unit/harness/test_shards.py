"""Shards of a run, and the report that their merge gives: that of the whole run, or a refusal."""

import json
import shutil
import tempfile
from pathlib import Path

import harness_builders as build
import pytest
from harness_project import REAL, Recorder, made, passing_suite, project_at, session
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mcore_compat.cli.main import app, main
from mcore_compat.errors import MergeError, UsageError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import Selection, Shard, github_shards, plan_cells
from mcore_compat.pipeline.execute import execute
from mcore_compat.pipeline.merge import measured_seconds, merge, read_shards
from mcore_compat.pipeline.run_folder import PlannedShard
from mcore_compat.records import Provisioned
from mcore_compat.verdicts import Verdict

MATRIX = load_matrix(REAL / "matrix.toml")
ROOT = Path(__file__).parents[3]
OUTCOMES = ("ok", "failed", "unresolvable", "crashed")
# The second entry is needed by a cell of 0.19 only, so most shards alone would call it unused.
EXPECTATIONS = """schema_version = 1
[[expectation]]
cell = "9.*"
check = "test_a.py::test_one"
kind = "fail"
failure = "assert 1 == 2"
reason = "a cell that there is not"
link = "https://example.org"
expires = 2999-01-01
[[expectation]]
cell = "0.1*"
check = "test_late.py::test_late"
kind = "fail"
failure = "assert 1 == 2"
reason = "ran by one cell alone"
link = "https://example.org"
expires = 2999-01-01
"""


def suite_of(outcomes):
    """A suite that ends in each cell as ``outcomes`` says."""

    def suite(cell, environment, options, out, *rest):
        outcome = outcomes.get(cell.id, "ok")
        if outcome == "crashed":
            raise OSError(28, "No space left on device")
        passed = passing_suite(cell, environment, options, out, *rest)
        (out / "output.log").write_text(f"output of {cell.id}\n", encoding="utf-8")
        if outcome == "ok":
            return passed
        facts = build.suite_facts(cell.megatron_core, mode=cell.expected_mode)
        lines = build.log_lines(outcomes={build.CHECKS[0]: "failed"})
        return build.suite_run(lines=lines, facts=facts, finished=build.finished(1))

    return suite


def provide_of(root, outcomes):
    def provide(cell):
        if outcomes.get(cell.id) == "unresolvable":
            return Provisioned(1.0, None, Verdict.UNRESOLVABLE, "numpy conflicts", "change it")
        return made(root)(cell)

    return provide


def run_part(root, part=None, outcomes=None, seconds=None, selection=None, **changes):
    """Run one shard of the project, or all of it, and save its report; returns the run's folder and report."""
    chosen = selection or Selection()
    whole = plan_cells(MATRIX, chosen)
    shard = None
    cells = whole
    if part is not None:
        shard = PlannedShard(index=part.index, count=part.count, whole=tuple(cell.id for cell in whole))
        cells = part.of(whole, seconds)
    outcomes = outcomes or {}
    prepared = session(
        root, cells=cells, suite=suite_of(outcomes), provide=provide_of(root, outcomes), shard=shard, **changes
    )
    report = execute(prepared, Recorder())
    prepared.folder.save_report(report)
    prepared.folder.alive.release()
    return prepared.folder.path, report


def comparable(report):
    """The report without the name and the clock of its run."""
    return report.model_copy(update={"run_id": "", "started": "", "seconds": 0.0})


def fresh_project(folder):
    root = Path(folder) / "project"
    data = root / "compat_matrix"
    data.mkdir(parents=True)
    shutil.copy(REAL / "matrix.toml", data)
    (data / "expectations.toml").write_text(EXPECTATIONS, encoding="utf-8")
    entries = "".join(f'[[check]]\nid = "{check}"\n' for check in build.CHECKS)
    (data / "inventory.toml").write_text(f"schema_version = 1\n{entries}", encoding="utf-8")
    (root / "suite").mkdir()
    (root / "suite" / "test_a.py").write_text("", encoding="utf-8")
    return root


@given(
    chosen=st.sets(st.sampled_from([cell.id for cell in MATRIX.cells]), min_size=1, max_size=7),
    count=st.integers(1, 5),
    outcomes=st.dictionaries(st.sampled_from([cell.id for cell in MATRIX.cells]), st.sampled_from(OUTCOMES)),
    seconds=st.dictionaries(st.sampled_from([cell.id for cell in MATRIX.cells]), st.floats(0.1, 500.0)),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_the_merged_report_is_that_of_the_whole_run(chosen, count, outcomes, seconds, data):
    count = min(count, len(chosen))
    selection = Selection(patterns=tuple(sorted(chosen)))
    with tempfile.TemporaryDirectory() as folder:
        root = fresh_project(folder)
        _, whole = run_part(root, outcomes=outcomes, selection=selection)
        parts = [run_part(root, Shard(index, count), outcomes, seconds, selection)[0] for index in range(1, count + 1)]
        merged = merge(project_at(root), read_shards(data.draw(st.permutations(parts))))
        assert comparable(merged.report) == comparable(whole)
        for cell_id in whole.planned:
            assert merged.folder.result(cell_id) == next(cell for cell in whole.cells if cell.id == cell_id)
            ran = outcomes.get(cell_id, "ok") in {"ok", "failed"}
            assert (merged.folder.cell(cell_id) / "output.log").is_file() == ran


@given(
    seconds=st.dictionaries(st.sampled_from([cell.id for cell in MATRIX.cells]), st.floats(0.1, 500.0)),
    count=st.integers(1, len(MATRIX.cells)),
)
def test_shards_are_a_partition_and_none_is_much_longer_than_needed(seconds, count):
    shards = [Shard(index, count).of(MATRIX.cells, seconds) for index in range(1, count + 1)]
    assert sorted(cell.id for shard in shards for cell in shard) == sorted(cell.id for cell in MATRIX.cells)
    if len(seconds) == len(MATRIX.cells):
        # Graham's bound of the longest-first rule: the mean, and at most one more cell.
        loads = [sum(seconds[cell.id] for cell in shard) for shard in shards]
        assert max(loads) <= sum(loads) / count + max(seconds.values()) + 1e-6


def test_long_cells_go_to_different_shards():
    long = {"0.12.3": 100.0, "0.13.0": 100.0}
    first, second = (Shard(index, 2).of(MATRIX.cells, dict.fromkeys(IDS, 1.0) | long) for index in (1, 2))
    assert {"0.12.3", "0.13.0"} & {cell.id for cell in first} == {"0.12.3"}
    assert {"0.12.3", "0.13.0"} & {cell.id for cell in second} == {"0.13.0"}


IDS = [cell.id for cell in MATRIX.cells]


def test_the_durations_of_the_committed_run_are_known():
    seconds = measured_seconds(ROOT / "docs" / "results" / "cpu" / "report.json")
    assert set(seconds) >= {"0.12.3", "0.19.2"}
    assert all(value > 1.0 for value in seconds.values())
    assert measured_seconds(ROOT / "nowhere.json") == {}


def test_durations_that_cannot_be_read_are_an_error(tmp_path):
    (tmp_path / "report.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be read"):
        measured_seconds(tmp_path / "report.json")


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_github_matrix_of_shards_has_every_cell_once(count):
    (line,) = github_shards(MATRIX.cells, count).splitlines()
    jobs = json.loads(line)["include"]
    assert len(jobs) == min(count, len(IDS))
    assert sorted(cell for job in jobs for cell in job["cells"]) == sorted(IDS)
    for job in jobs:
        assert [cell.id for cell in Shard.parse(job["shard"]).of(MATRIX.cells)] == job["cells"]
        assert set(job["python"].splitlines()) == {MATRIX.cell(cell_id).python for cell_id in job["cells"]}


def shards_of(project, count=3, **changes):
    return [run_part(project, Shard(index, count), **changes)[0] for index in range(1, count + 1)]


def test_a_missing_shard_is_unproven(project):
    first, _, third = shards_of(project)
    report = merge(project_at(project), read_shards([first, third])).report
    lost = [cell.id for cell in Shard(2, 3).of(MATRIX.cells)]
    assert report.verdict is Verdict.UNPROVEN
    assert report.planned == tuple(IDS)
    assert [finding.kind for finding in report.findings] == ["shard-missing", *["cell-lost"] * len(lost)]
    assert [cell.id for cell in report.cells] == [cell_id for cell_id in IDS if cell_id not in lost]


def test_a_break_of_one_shard_is_that_of_the_merged_run_even_if_another_is_missing(project):
    first, second, _ = shards_of(project, outcomes={IDS[0]: "failed"})
    assert merge(project_at(project), read_shards([first, second])).report.verdict is Verdict.BREAK


@pytest.mark.parametrize("again", [0, 1])
def test_a_shard_given_twice_is_refused(project, again):
    paths = shards_of(project, 2)
    with pytest.raises(MergeError, match="is in shard") as caught:
        read_shards([*paths, run_part(project, Shard(again + 1, 2))[0]])
    assert caught.value.exit_code == 3


def test_overlapping_shards_are_refused(project):
    """Two hosts with different durations cut the plan differently."""
    one, _ = run_part(project, Shard(1, 2))
    other, _ = run_part(project, Shard(2, 2), seconds=dict.fromkeys(IDS, 1.0) | {"0.12.3": 1000.0})
    with pytest.raises(MergeError, match="the same --durations"):
        read_shards([one, other])


def test_shards_of_different_runs_are_refused(project):
    first, second = shards_of(project, 2)
    (project / "suite" / "test_a.py").write_text("# changed\n", encoding="utf-8")
    changed, _ = run_part(project, Shard(2, 2))
    for other, what in [
        (changed, "suite differ"),
        (run_part(project, Shard(2, 2), profile="nightly")[0], "profile"),
        (run_part(project, Shard(3, 3))[0], "number of shards"),
        (run_part(project, Shard(2, 2), selection=Selection(patterns=("0.18.*",)))[0], "cells of all shards"),
    ]:
        with pytest.raises(MergeError, match=what) as caught:
            read_shards([first, other])
        assert caught.value.exit_code == 3
    assert len(read_shards([first, second])) == 2


def test_a_run_that_is_not_a_shard_is_refused(project, tmp_path):
    with pytest.raises(MergeError, match="is not a shard"):
        read_shards([run_part(project)[0]])
    with pytest.raises(UsageError, match="not the folder of a run"):
        read_shards([tmp_path])
    with pytest.raises(UsageError, match="no run to merge"):
        read_shards([])


def test_a_checkout_with_other_data_does_not_merge(project):
    paths = shards_of(project, 2)
    (project / "compat_matrix" / "expectations.toml").write_text("schema_version = 1\n# x\n", encoding="utf-8")
    with pytest.raises(MergeError, match="expectations differ"):
        merge(project_at(project), read_shards(paths))


def test_a_shard_that_did_not_end_is_unproven(project):
    first, second = shards_of(project, 2)
    (second / "report.json").unlink()
    report = merge(project_at(project), read_shards([first, second])).report
    assert [finding.kind for finding in report.findings] == ["shard-unfinished"]
    assert report.verdict is Verdict.UNPROVEN
    (first / "report.json").unlink()
    with pytest.raises(MergeError, match="None of these shards has a report"):
        merge(project_at(project), read_shards([first, second]))


def test_an_edited_result_is_lost(project):
    first, second = shards_of(project, 2)
    path = first / "cells" / IDS[0] / "result.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"passed": 3', '"passed": 300'), encoding="utf-8")
    report = merge(project_at(project), read_shards([first, second])).report
    assert [finding.kind for finding in report.findings] == ["cell-lost"]
    assert report.verdict is Verdict.UNPROVEN


def test_the_command_writes_every_format_and_ends_with_the_verdict(project):
    for name in ("rules", "contracts"):
        shutil.copytree(REAL / name, project / "compat_matrix" / name)
    paths = shards_of(project, 2)
    done = CliRunner().invoke(app, ["merge", *map(str, paths), "--root", str(project)])
    latest = project / "reports" / "latest"
    assert done.exit_code == 0, done.output
    assert {path.name for path in latest.iterdir()} >= {"report.json", "report.md", "report.html", "junit.xml"}
    one = CliRunner().invoke(app, ["merge", str(paths[0]), "--root", str(project)])
    assert one.exit_code == 3
    assert "shard 2/2 is missing" in one.output
    with pytest.raises(SystemExit) as caught:
        main(["merge", str(paths[0]), str(paths[0]), "--root", str(project)])
    assert caught.value.code == 3


def test_the_plan_of_shards(project):
    def planned(*options):
        done = CliRunner().invoke(app, ["plan", *options, "--root", str(ROOT)], catch_exceptions=False)
        return done.stdout

    jobs = json.loads(planned("--github", "--shards", "4"))["include"]
    for job in jobs:
        listed = [line.split()[0] for line in planned("--shard", job["shard"]).splitlines()]
        assert listed == job["cells"]
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--shards", "4", "--root", str(ROOT)])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--shard", "1/2", "--durations", "nowhere.json", "--root", str(ROOT)])
    assert caught.value.code == 2
