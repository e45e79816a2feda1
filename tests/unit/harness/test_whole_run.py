"""One run from plan to report, with pretended environments and suites: nothing planned is ever lost."""

import threading

import harness_builders as build
import pytest
from harness_project import REAL, Recorder, made, passing_suite, run, session

from mcore_compat.errors import SelectionError, UsageError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.matrix.selection import Selection
from mcore_compat.pipeline.execute import InterruptedRunError, execute
from mcore_compat.pipeline.one_cell import judge_one
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.records import Provisioned
from mcore_compat.verdicts import Verdict


def test_every_planned_cell_is_in_the_report(project):
    report, recorder = run(project)
    assert report.planned == ("0.18.0", "0.18.2", "0.19.2")
    assert [cell.id for cell in report.cells] == list(report.planned)
    assert sorted(recorder.judged) == sorted(report.planned)
    assert report.verdict is Verdict.OK


def test_one_red_cell_makes_the_run_red_and_the_others_go_on(project):
    def provide(cell):
        if cell.id == "0.18.0":
            return Provisioned(1.0, None, Verdict.UNRESOLVABLE, "numpy conflicts", "change it")
        return made(project)(cell)

    report, _ = run(project, provide=provide)
    assert [cell.verdict for cell in report.cells] == [Verdict.UNRESOLVABLE, Verdict.OK, Verdict.OK]
    assert report.verdict is Verdict.UNRESOLVABLE


class DroppingExecutor:
    """Loses one cell, as a worker that dies without a word does."""

    def run(self, cells, work, on_result):
        for cell in cells:
            if cell.id != "0.18.2":
                on_result(work(cell, threading.Event()))


def test_a_dropped_cell_is_unproven(project):
    report = execute(session(project), Recorder(), DroppingExecutor())
    assert report.verdict is Verdict.UNPROVEN
    assert [(finding.kind, finding.verdict) for finding in report.findings] == [("cell-lost", Verdict.UNPROVEN)]


def test_an_expectation_for_a_cell_that_does_not_exist_is_red(project):
    (project / "compat_matrix" / "expectations.toml").write_text(
        'schema_version = 1\n[[expectation]]\ncell = "9.*"\ncheck = "a.py::test_a"\nkind = "fail"\n'
        'failure = "assert .* == 2"\nreason = "broken upstream"\nlink = "https://example.org"\nexpires = 2999-01-01\n',
        encoding="utf-8",
    )
    assert run(project)[0].verdict is Verdict.BREAK


def test_another_folder_of_data_has_cells_and_expectations_of_its_own(project):
    """The ecosystem's few cells lie beside the matrix; the digest that a resumed run must match is that folder's."""
    other = project / "compat_matrix" / "ecosystem"
    other.mkdir()
    for name in ("matrix.toml", "expectations.toml"):
        (other / name).write_text((REAL / "ecosystem" / name).read_text(encoding="utf-8"), encoding="utf-8")
    prepared = session(
        project, data=other, inventory=project / "compat_matrix" / "inventory.toml", selection=Selection()
    )
    assert {cell.id for cell in prepared.cells} == {
        f"{release}-{name}" for release in ("0.17.1", "0.19.2") for name in ("peft", "verl")
    }
    assert prepared.plan.inputs["matrix"] != session(project).plan.inputs["matrix"]


def interrupted(project):
    """A run that is stopped while its second cell runs."""

    def suite(cell, environment, options, out, host, cancel, on_progress):
        if cell.id == "0.18.2":
            raise KeyboardInterrupt
        if cell.id == "0.19.2":
            # The pool may start it before the interruption has reached everyone.
            assert cancel.wait(10)
            return build.suite_run(finished=build.finished(-15, cancelled=True))
        return passing_suite(cell, environment, options, out)

    with pytest.raises(InterruptedRunError, match="1 of 3 cells") as caught:
        run(project, jobs=1, suite=suite)
    assert "--resume" in caught.value.next_step


def test_an_interrupted_run_keeps_what_it_knew_and_is_resumed(project):
    interrupted(project)
    (folder,) = (project / "reports").iterdir()
    assert [path.parent.name for path in folder.glob("cells/*/result.json")] == ["0.18.0"]
    ran = []

    def suite(cell, *rest):
        ran.append(cell.id)
        return passing_suite(cell, *rest)

    report, recorder = run(project, resume=True, suite=suite)
    assert sorted(ran) == ["0.18.2", "0.19.2"]
    assert recorder.judged[0] == "0.18.0"
    assert report.run_id == folder.name
    assert report.verdict is Verdict.OK


@pytest.mark.parametrize("kind", ["gate", "bisect", "gpu", "collect"])
def test_what_another_command_left_is_never_resumed(project, kind):
    """A bisection and a gate leave runs of one or two cells; a plain run does not continue them."""
    interrupted(project)
    (own,) = (project / "reports").iterdir()
    session(project, kind=kind, cells=[load_matrix(REAL / "matrix.toml").cells[-1]])
    report, _ = run(project, resume=True)
    assert (report.run_id, len(report.planned)) == (own.name, 3)


@pytest.mark.parametrize(
    "name",
    [
        "compat_matrix/matrix.toml",
        "compat_matrix/inventory.toml",
        "compat_matrix/expectations.toml",
        "suite/test_a.py",
    ],
)
def test_a_run_whose_inputs_changed_is_not_resumed(project, name):
    interrupted(project)
    (project / name).write_text((project / name).read_text(encoding="utf-8") + "\n# x\n", encoding="utf-8")
    with pytest.raises(UsageError, match="changed since it started"):
        run(project, resume=True)


def test_a_run_that_is_still_going_on_is_not_resumed(project):
    going_on = session(project)
    with pytest.raises(UsageError, match=f"{going_on.plan.run_id} is still running"):
        run(project, resume=True)
    going_on.folder.alive.release()
    assert run(project, resume=True)[0].run_id == going_on.plan.run_id


def test_a_result_that_was_edited_is_judged_again(project):
    interrupted(project)
    (path,) = project.glob("reports/*/cells/0.18.0/result.json")
    path.write_text(path.read_text(encoding="utf-8").replace('"passed": 3', '"passed": 300'), encoding="utf-8")
    report, _ = run(project, resume=True)
    assert [cell.checks.passed for cell in report.cells] == [3, 3, 3]


def test_the_suite_of_a_run_is_the_one_of_its_start(project):
    """An edit while the run goes on reaches neither its cells nor its digest."""
    seen = []

    def suite(cell, environment, options, out, *rest):
        seen.append((options.suite / "test_a.py").read_text(encoding="utf-8"))
        (project / "suite" / "test_a.py").write_text(f"# edited during {cell.id}\n", encoding="utf-8")
        return passing_suite(cell, environment, options, out, *rest)

    before = session(project).plan.inputs["suite"]
    report, _ = run(project, suite=suite, jobs=1)
    assert seen == ["", "", ""]
    assert report.verdict is Verdict.OK
    assert report.suite_sha256 == before != session(project).plan.inputs["suite"]


def test_a_cell_whose_suite_was_changed_under_it_is_not_believed(project):
    def suite(cell, environment, options, out, *rest):
        if cell.id == "0.18.2":
            (options.suite / "conftest.py").write_text("# softened\n", encoding="utf-8")
        return passing_suite(cell, environment, options, out, *rest)

    report, _ = run(project, suite=suite, jobs=1)
    verdicts = {cell.id: cell.verdict for cell in report.cells}
    assert verdicts == {"0.18.0": Verdict.OK, "0.18.2": Verdict.INFRA, "0.19.2": Verdict.INFRA}
    assert "copy of the suite" in report.cells[1].reason


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RecursionError(), KeyError("caf\udce9")])
@pytest.mark.parametrize("where", ["provide", "suite"])
def test_whatever_happens_to_one_cell_the_others_are_judged(project, where, error):
    usual = {"provide": made(project), "suite": passing_suite}[where]

    def fails(cell, *rest):
        if cell.id == "0.18.2":
            raise error
        return usual(cell, *rest)

    report, _ = run(project, **{where: fails})
    assert [cell.verdict for cell in report.cells] == [Verdict.OK, Verdict.INFRA, Verdict.OK]
    assert type(error).__name__ in report.cells[1].reason


def test_the_whole_output_of_the_installer_is_in_the_run_s_folder(project):
    def provide(cell):
        if cell.id == "0.18.0":
            return Provisioned(1.0, None, Verdict.UNRESOLVABLE, "no compiler", "install one", "line 1\n\x1b[31mline 2")
        return made(project)(cell)

    run(project, provide=provide)
    (log,) = project.glob("reports/*/cells/*/install.log")
    assert (log.parent.name, log.read_text(encoding="utf-8")) == ("0.18.0", "line 1\nline 2")


def test_nothing_to_resume(project):
    with pytest.raises(UsageError, match="no interrupted run"):
        run(project, resume=True)


def test_what_running_the_suite_leaves_behind_is_not_a_change(project):
    interrupted(project)
    for name in (".pytest_cache/v/lastfailed", "__pycache__/test_a.pyc", ".hypothesis/examples/x"):
        path = project / "suite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x", encoding="utf-8")
    assert run(project, resume=True)[0].verdict is Verdict.OK


def test_a_cancelled_suite_leaves_no_result(project):
    def suite(cell, environment, options, out, host, cancel, on_progress):
        cancel.set()
        out.mkdir(parents=True, exist_ok=True)
        return build.suite_run(finished=build.finished(-15, cancelled=True))

    prepared = session(project, jobs=1, suite=suite)
    assert judge_one(prepared, prepared.cells[0], Recorder(), threading.Event()) is None
    assert prepared.folder.result("0.18.0") is None


def test_a_result_that_cannot_be_written_ends_the_run(project, monkeypatch):
    def refuse(_self, _result):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "save_result", refuse)
    with pytest.raises(OSError, match="No space"):
        run(project)


def test_bad_requests_are_refused_before_any_cell_starts(project):
    with pytest.raises(SelectionError):
        run(project, selection=Selection(patterns=("0.18.1",)))
    with pytest.raises(UsageError, match="no suite"):
        run(project, suite_folder=project / "nowhere")


def test_the_fixture_is_the_real_matrix(project):
    assert load_matrix(project / "compat_matrix" / "matrix.toml") == load_matrix(REAL / "matrix.toml")
