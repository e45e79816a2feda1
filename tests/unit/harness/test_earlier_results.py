"""Results of earlier runs: never without being asked, never after anything changed, and refuted by a second look."""

import dataclasses
import datetime as dt

import harness_builders as build
import pytest
from harness_project import passing_suite
from harness_project import run as run_project

from mcore_compat.matrix.cells import load_matrix
from mcore_compat.pipeline.reuse import CachedResult, ResultCache, cache_key, sample
from mcore_compat.report import markdown
from mcore_compat.subjects.selection import ChosenSubject
from mcore_compat.verdicts import Verdict

CELLS = ("0.18.0", "0.18.2", "0.19.2")


@pytest.fixture
def suites():
    """The cells whose suite ran, in order."""
    return []


@pytest.fixture
def run(suites):
    """Run the project with one job; another suite may be given."""

    def start(root, suite=passing_suite, **changes):
        def counting(cell, *rest):
            suites.append(cell.id)
            return suite(cell, *rest)

        return run_project(root, jobs=1, suite=counting, **changes)[0]

    return start


def test_nothing_is_reused_unless_it_is_asked_for(project, suites, run):
    run(project)
    report = run(project)
    assert suites == [*CELLS, *CELLS]
    assert {cell.reused_from for cell in report.cells} == {None}


def test_what_has_not_changed_is_reused_but_for_the_sample(project, suites, run):
    first = run(project)
    suites.clear()
    second = run(project, reuse=True)
    fresh = sample(second.run_id, CELLS)
    assert set(suites) == fresh
    assert len(fresh) == 1
    assert {cell.id: cell.reused_from for cell in second.cells} == {
        cell: None if cell in fresh else first.run_id for cell in CELLS
    }
    assert second.verdict is Verdict.OK
    text = markdown.render(second)
    assert "2 of them judged in earlier runs" in text
    assert f"judged in run {first.run_id}, with the same environment" in text
    # The result itself is the one that was judged, and a third run names the run that judged it, not the second.
    old = {cell.id: cell for cell in first.cells}
    for cell in second.cells:
        assert cell.results == old[cell.id].results
    third = run(project, reuse=True)
    assert {cell.reused_from for cell in third.cells} <= {None, first.run_id, second.run_id}


def test_a_changed_suite_is_judged_anew(project, suites, run):
    run(project)
    suites.clear()
    (project / "suite" / "test_a.py").write_text("# another", encoding="utf-8")
    run(project, reuse=True)
    assert suites == list(CELLS)


def test_another_cell_s_line_of_the_matrix_does_not_matter(project, suites, run):
    run(project)
    suites.clear()
    matrix = project / "compat_matrix" / "matrix.toml"
    matrix.write_text(matrix.read_text(encoding="utf-8") + "\n# a remark\n", encoding="utf-8")
    run(project, reuse=True)
    assert len(suites) == 1


def test_a_red_result_is_never_kept(project, run):
    failing = build.suite_run(build.log_lines(outcomes={build.CHECKS[0]: "failed"}))
    run(project, suite=lambda *_: failing)
    assert not list((project / ".cells").glob(".results/*"))


def test_a_cell_that_comes_out_otherwise_refutes_what_was_kept(project, suites, run):
    run(project)
    kept = len(list((project / ".cells" / ".results").glob("*.json")))

    def failing(cell, *_):
        lines = build.log_lines(outcomes={build.CHECKS[1]: "failed"})
        return build.suite_run(lines, facts=build.suite_facts(cell.megatron_core, mode=cell.expected_mode))

    report = run(project, suite=failing, reuse=True)
    (fresh,) = (cell for cell in report.cells if cell.reused_from is None)
    assert report.verdict is fresh.verdict is Verdict.BREAK
    (finding,) = (finding for finding in fresh.findings if finding.kind == "reuse-refuted")
    assert (finding.verdict, build.CHECKS[1] in finding.message) == (Verdict.UNPROVEN, True)
    assert len(list((project / ".cells" / ".results").glob("*.json"))) == kept - 1


def test_one_that_passes_now_and_was_otherwise_before_is_unproven(project, suites, run):
    """Green twice, by different checks: it did not depend on its inputs alone."""
    run(project)
    for path in (project / ".cells" / ".results").glob("*.json"):
        kept = CachedResult.model_validate_json(path.read_text(encoding="utf-8"))
        fewer = kept.model_copy(update={"result": kept.result.model_copy(update={"results": kept.result.results[1:]})})
        path.write_text(fewer.model_dump_json(), encoding="utf-8")
    report = run(project, reuse=True)
    (fresh,) = (cell for cell in report.cells if cell.reused_from is None)
    assert report.verdict is fresh.verdict is Verdict.UNPROVEN
    assert "had another result for this cell, with the same inputs" in fresh.reason
    assert "without --reuse" in fresh.findings[0].next_step


def test_one_that_ran_in_another_mode_before_is_unproven(project, run):
    """The same checks passed, in another mode: the kept result was of something else."""
    run(project)
    for path in (project / ".cells" / ".results").glob("*.json"):
        kept = CachedResult.model_validate_json(path.read_text(encoding="utf-8"))
        other = kept.model_copy(update={"result": kept.result.model_copy(update={"mode": "legacy"})})
        path.write_text(other.model_dump_json(), encoding="utf-8")
    report = run(project, reuse=True)
    (fresh,) = (cell for cell in report.cells if cell.reused_from is None)
    assert report.verdict is fresh.verdict is Verdict.UNPROVEN
    assert "mode legacy, now hook" in fresh.reason


def test_the_sample_is_a_tenth_at_least_one_and_another_in_each_run():
    cells = [f"0.{minor}.0" for minor in range(30)]
    assert len(sample("a", cells)) == 3
    assert len(sample("a", cells[:11])) == 2
    assert len(sample("a", cells[:1])) == 1
    assert sample("a", cells) == sample("a", reversed(cells))
    assert len({sample(f"run {number}", cells) for number in range(20)}) > 10
    assert frozenset().union(*(sample(f"run {number}", cells) for number in range(200))) == frozenset(cells)


def decided(**changes):
    given = {
        "cell": build.cell(),
        "environment": build.provisioned().environment,
        "inputs": {"suite": "a", "matrix": "b"},
        "options": {"profile": "ci", "workers": 0},
        "expectations": build.expectations(build.expectation()),
        "host": {"PATH": "/bin", "HOME": "/root", "TOKEN": "x"},
        "today": build.TODAY,
    }
    return cache_key(**(given | changes))


def _with_facts(**changes):
    environment = build.provisioned().environment
    return dataclasses.replace(environment, facts=environment.facts.model_copy(update=changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"cell": build.cell("0.19.2")},
        {"cell": build.cell(expected_mode="legacy")},
        {"environment": _with_facts(python="3.12.99")},
        {"environment": _with_facts(distributions={"torch": ("9.9",)})},
        {"environment": _with_facts(megatron_files=None)},
        {"environment": _with_facts(subject_files=None)},
        {"environment": dataclasses.replace(build.provisioned().environment, lock="other")},
        {"inputs": {"suite": "c", "matrix": "b"}},
        {"options": {"profile": "nightly", "workers": 0}},
        {"options": {"profile": "ci", "workers": 2}},
        {"host": {"PATH": "/usr/bin", "HOME": "/root", "TOKEN": "x"}},
        {"today": build.expectation().expires + dt.timedelta(days=1)},
    ],
)
def test_every_input_decides(changes):
    assert decided(**changes) != decided()


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": _with_facts(seconds=99.0)},
        {"inputs": {"suite": "a", "matrix": "c"}},
        {"host": {"PATH": "/bin", "HOME": "/home/me", "TOKEN": "y"}},
        {"today": build.TODAY + dt.timedelta(days=1)},
    ],
)
def test_what_no_cell_sees_does_not_decide(changes):
    assert decided(**changes) == decided()


def test_what_cannot_be_read_is_not_there(tmp_path):
    earlier = ResultCache(tmp_path)
    assert earlier.find("a") is None
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    assert earlier.find("a") is None
    red = CachedResult(run_id="r", result=build.result(verdict=Verdict.BREAK))
    (tmp_path / "a.json").write_text(red.model_dump_json(), encoding="utf-8")
    assert earlier.find("a") is None, "an edited file makes nothing green"
    earlier.keep("b", red)
    assert not (tmp_path / "b.json").exists()


def test_a_disk_that_refuses_costs_the_kept_result_only(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    ResultCache(blocked).keep("a", CachedResult(run_id="r", result=build.result()))
    assert ResultCache(blocked).find("a") is None


@pytest.mark.parametrize("what", ["source", "only", "subject"])
def test_what_cannot_be_named_is_not_kept(what, project, run):
    """A folder's content, one check alone, a subject from a package: nothing here says whether they changed."""
    changes = {}
    if what == "source":
        cells = load_matrix(project / "compat_matrix" / "matrix.toml").cells
        changes["cells"] = [cells[-1].model_copy(update={"source": "git+file:///x@main"})]
    elif what == "only":
        changes["only"] = "test_a.py::test_one"
    else:
        changes["subject"] = ChosenSubject("other", "package.module:Class", "package.module:Class")
    run(project, **changes)
    assert not list((project / ".cells").glob(".results/*"))
