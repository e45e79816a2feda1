"""Results on disk: whole or not at all, resumable, and a report that cannot be written is never green."""

import datetime as dt
import shutil

import harness_builders as build
import pytest

from mcore_compat.errors import ReportError, UsageError
from mcore_compat.files.scrub import Scrubber, absolute_paths
from mcore_compat.pipeline.run_folder import RunFolder, RunPlan, new_run_id, newest_unfinished
from mcore_compat.results import Report
from mcore_compat.verdicts import Verdict

NOW = dt.datetime(2026, 11, 30, 10, tzinfo=dt.UTC)


def plan(run_id="20261130T100000Z-aaaa"):
    return RunPlan(
        run_id=run_id, kind="run", started=NOW.isoformat(), planned=("0.18.2",), profile="ci", inputs={"subject": "ab"}
    )


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "reports", plan(), Scrubber({"base": tmp_path}))


def test_a_result_is_read_back_without_paths_and_logs_are_scrubbed(folder, tmp_path):
    cell = folder.cell("0.18.2")
    cell.mkdir(parents=True)
    for name in ("output.log", "reportlog.jsonl", "facts.json", "origins-1.json"):
        (cell / name).write_text(f'"{tmp_path}/x"', encoding="utf-8")
    written = folder.save_result(
        build.result(findings=[build.finding(f"in {tmp_path}/a.py and /usr/lib/python3/b.py")])
    )
    assert folder.result("0.18.2") == written
    assert written.findings[0].message == "in <base>/a.py and <…>/python3/b.py"
    for path in folder.path.rglob("*"):
        if path.is_file():
            assert absolute_paths(path.read_text(encoding="utf-8")) == ()
            assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_a_truncated_result_is_no_result(folder):
    folder.save_result(build.result())
    path = folder.cell("0.18.2") / "result.json"
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    assert folder.result("0.18.2") is None


def test_a_result_is_taken_only_as_this_run_has_written_it(folder):
    written = folder.save_result(build.result(verdict=Verdict.BREAK))
    path = folder.cell("0.18.2") / "result.json"
    assert folder.result("0.18.2") == written
    green = path.read_text(encoding="utf-8").replace('"break"', '"ok"')
    path.write_text(green, encoding="utf-8")
    assert folder.result("0.18.2") is None


def test_a_result_of_another_cell_or_of_another_plan_does_not_count(folder):
    folder.save_result(build.result())
    shutil.copytree(folder.cell("0.18.2"), folder.cell("0.19.2"))
    assert folder.result("0.19.2") is None
    plan_file = folder.path / "run.json"
    plan_file.write_text(plan_file.read_text(encoding="utf-8").replace('"ci"', '"dev"'), encoding="utf-8")
    assert folder.result("0.18.2") is None


def test_a_run_has_one_process_at_a_time(folder):
    again = RunFolder(folder.path, folder.scrubber)
    with pytest.raises(UsageError, match="still running"):
        again.keep_alive()
    folder.alive.release()
    again.keep_alive()
    again.alive.release()


def test_a_run_that_is_just_being_started_is_not_resumed(tmp_path, monkeypatch):
    seen = []
    write = RunFolder._json

    def written(folder, name, data):
        path = write(folder, name, data)
        with pytest.raises(UsageError) as caught:
            newest_unfinished(tmp_path / "reports", "run")
        seen.append(caught.value.problem)
        return path

    monkeypatch.setattr(RunFolder, "_json", written)
    RunFolder.create(tmp_path / "reports", plan(), Scrubber({})).alive.release()
    assert ["still running" in problem for problem in seen] == [True]


def test_the_report_is_read_back_and_latest_names_the_newest(folder, tmp_path):
    report = build.report(build.result())
    folder.save_report(report)
    folder.publish()
    latest = tmp_path / "reports" / "latest"
    assert Report.model_validate_json((latest / "report.json").read_text(encoding="utf-8")) == report
    newer = RunFolder.create(tmp_path / "reports", plan("20261130T110000Z-bbbb"), folder.scrubber)
    newer.publish()
    assert latest.resolve() == newer.path


def test_only_an_unfinished_run_is_resumed_and_the_newest_of_them(folder, tmp_path):
    reports = tmp_path / "reports"
    with pytest.raises(UsageError, match="still running"):
        newest_unfinished(reports, "run")
    folder.alive.release()
    assert newest_unfinished(reports, "run") == plan()
    newer = RunFolder.create(reports, plan("20261130T110000Z-bbbb"), folder.scrubber)
    assert newest_unfinished(reports, "run") == plan()
    newer.alive.release()
    assert newest_unfinished(reports, "run").run_id == "20261130T110000Z-bbbb"
    newer.save_report(build.report(build.result()))
    assert newest_unfinished(reports, "run") == plan()
    folder.save_report(build.report(build.result()))
    with pytest.raises(UsageError, match="no interrupted run"):
        newest_unfinished(reports, "run")


def test_a_report_that_cannot_be_written_is_an_error(folder):
    (folder.path / "report.json").mkdir()
    with pytest.raises(ReportError, match=r"report\.json cannot be written") as caught:
        folder.save_report(build.report(build.result()))
    assert caught.value.exit_code == 3
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".report")]


def test_a_folder_that_cannot_be_made_is_an_error_before_any_work(tmp_path):
    (tmp_path / "reports").write_text("a file", encoding="utf-8")
    with pytest.raises(ReportError):
        RunFolder.create(tmp_path / "reports", plan(), Scrubber({}))


def test_run_ids_sort_by_time():
    assert new_run_id(NOW) < new_run_id(NOW + dt.timedelta(seconds=1))
    assert new_run_id(NOW) != new_run_id(NOW)
