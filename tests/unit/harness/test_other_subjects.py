"""Another implementation than this project's own: how it is chosen, and what its verdict counts and tells."""

import harness_builders as build
import pytest
from typer.testing import CliRunner

from mcore_compat.cli import gate as gate_cli
from mcore_compat.cli import main as cli
from mcore_compat.cli import run as run_cli
from mcore_compat.errors import UsageError
from mcore_compat.gate.sides import known_reports
from mcore_compat.judge.cell import judge_cell
from mcore_compat.report import markdown, terminal
from mcore_compat.results import Evidence, Finding
from mcore_compat.run import suite as runner
from mcore_compat.run.suite import SuiteOptions, run_suite
from mcore_compat.subjects.selection import ChosenSubject, choose_subject
from mcore_compat.verdicts import Verdict

ONE, TWO, THREE = build.CHECKS
STOCK = choose_subject("stock")
NONE = Evidence()


def judged(chosen=STOCK, checks=(ONE, TWO), **facts):
    said = {
        "checks": checks,
        "subject": "stock",
        "mode": None,
        "evidence": NONE,
        "capabilities": ["call"],
        "lacks": {"patch": "no patch algebra", "mode": "no mode detection"},
        "not_applicable": {THREE: ["patch"]},
    }
    origins = (build.origins(modules={"megatron": 190, "torch": 900}),)
    run = build.suite_run(build.log_lines(checks), facts=build.suite_facts(**(said | facts)), origins=origins)
    return judge_cell(
        build.cell(), build.provisioned(), run, build.inventory(), build.expectations(), build.TODAY, subject=chosen
    )


def kinds(result):
    return {finding.kind for finding in result.findings}


def test_checks_about_what_a_subject_lacks_are_told_and_not_counted():
    result = judged()
    assert result.verdict is Verdict.OK
    assert (result.checks.planned, result.checks.passed, result.checks.not_applicable) == (2, 2, 1)
    assert result.findings == (
        Finding(
            kind="not-applicable",
            message="stock has no `patch`: no patch algebra; 1 declared checks are about it",
            next_step="Nothing, if the subject is meant to be without it.",
        ),
    )


def test_checks_about_what_it_has_must_run():
    assert judged(checks=(ONE,)).verdict is Verdict.UNPROVEN
    # What decides comes before what is only told.
    assert [finding.kind for finding in judged(checks=(ONE,)).findings] == ["missing-check", "not-applicable"]
    assert judged(not_applicable={}).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize("about", [["call"], ["patch", "call"], ["something"], []])
def test_a_check_is_not_declared_away_by_a_capability_that_is_there(about):
    assert "missing-check" in kinds(judged(not_applicable={THREE: about}))


def test_our_own_library_lacks_nothing():
    result = judged(ChosenSubject(), subject="mcore_fused")
    assert result.verdict is Verdict.UNPROVEN
    assert {"missing-check", "no-evidence"} <= kinds(result)
    assert result.checks.not_applicable == 0


def test_the_subject_that_was_asked_for_must_be_the_one_that_ran():
    assert kinds(judged(lacks={}, not_applicable={}, checks=build.CHECKS)) == set()
    told = {"capabilities": ["call", "patch"], "evidence": Evidence(hook_calls=1, kernel_launches=1)}
    assert "wrong-subject" not in kinds(judged(**told))
    for subject, name in ((STOCK, "mcore_fused"), (ChosenSubject(), "stock")):
        result = judge_cell(
            build.cell(),
            build.provisioned(),
            build.suite_run(facts=build.suite_facts(subject=name)),
            build.inventory(),
            build.expectations(),
            build.TODAY,
            subject=subject,
        )
        (finding,) = result.findings
        assert (result.verdict, finding.kind) == (Verdict.UNPROVEN, "wrong-subject")
        assert finding.message == f"the suite judged {name}, not {subject.name}"
        assert finding.next_step == ("Read the cell's output.log; the suite must load what MCORE_COMPAT_SUBJECT names.")


@pytest.mark.parametrize("promise", ["patch", "evidence", "kernel"])
def test_a_subject_that_promises_fusion_must_show_that_it_ran(promise):
    """One that patches nothing promises no fusion; one that patches and counts nothing proves nothing."""
    claims = {"capabilities": ["call", promise], "lacks": {}, "not_applicable": {}, "checks": build.CHECKS}
    assert kinds(judged(**claims)) == {"no-evidence"}
    assert kinds(judged(capabilities=None, lacks={}, not_applicable={}, checks=build.CHECKS)) == {"no-evidence"}


def test_a_subject_with_modes_must_choose_the_expected_one():
    modes = {"capabilities": ["call", "mode"], "lacks": {"patch": "no patch algebra"}}
    assert judged(**modes, mode="hook").verdict is Verdict.OK
    assert judged(**modes, mode="legacy").verdict is Verdict.BREAK
    assert judged(**modes, mode=None).verdict is Verdict.UNPROVEN
    assert judged(mode="legacy").verdict is Verdict.OK


def test_built_in_names_are_taken_as_they_are():
    assert choose_subject("mcore_fused") == ChosenSubject()
    assert choose_subject("mcore_fused").is_ours
    assert (STOCK.name, STOCK.variable, STOCK.is_ours) == ("stock", "stock", False)
    assert choose_subject("my_framework.subject:Mine").variable == "my_framework.subject:Mine"


def test_a_file_is_named_without_its_folder_and_known_by_its_content(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    pass\n", encoding="utf-8")
    first = choose_subject(f"{file}:Mine")
    assert (first.name, first.variable) == ("mine.py:Mine", f"{file}:Mine")
    assert not first.is_ours
    file.write_text("class Mine:\n    name = 'mine'\n", encoding="utf-8")
    assert choose_subject(f"{file}:Mine").digest != first.digest


@pytest.mark.parametrize(
    ("text", "problem", "step"),
    [
        ("stok", "There is no subject `stok`.", "Did you mean `stock`?"),
        ("", "There is no subject ``.", "Allowed: mcore_fused, stock, "),
        ("absent.py:Mine", "absent.py cannot be read", "file that is there"),
        ("broken.py:Mine", "broken.py is no Python", "Correct"),
        ("mine.py:Other", "no class `Other` at its top level; it has Mine", "file.py:Class"),
        ("empty.py:Other", "it has none", "file.py:Class"),
        ("mine.py", "There is no subject `mine.py`", "file.py:Class"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_made(text, problem, step, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n", encoding="utf-8")
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    (tmp_path / "broken.py").write_text("class Mine(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        choose_subject(text)
    assert problem in refused.value.problem
    assert step in refused.value.next_step


@pytest.mark.parametrize("command", [["run"], ["gate", "megatron-core==0.19.2"]])
def test_the_command_line_refuses_it_first(command, monkeypatch):
    def never(*_arguments, **_options):
        raise AssertionError("something was prepared")

    monkeypatch.setattr(run_cli, "prepare", never)
    monkeypatch.setattr(gate_cli, "read_sides", never)
    result = CliRunner().invoke(cli.app, [*command, "--subject", "stok"])
    assert isinstance(result.exception, UsageError)


def test_the_suite_is_told_its_subject(tmp_path, monkeypatch):
    seen = {}

    def pretended(_command, *, env, **_options):
        seen.update(env)
        return build.finished()

    monkeypatch.setattr(runner, "run_logged", pretended)
    environment = build.provisioned(folder=tmp_path / "cell").environment
    options = SuiteOptions(tmp_path, "ci", subject=STOCK)
    run_suite(build.cell(), environment, options, tmp_path / "out", {"MCORE_COMPAT_SUBJECT": "mine:Mine"}, None)
    assert seen["MCORE_COMPAT_SUBJECT"] == "stock"


def test_reports_say_which_subject_was_judged():
    plain = build.report(build.result())
    other = plain.model_copy(update={"subject": plain.subject.model_copy(update={"judged": "stock"})})
    assert markdown.render(plain).startswith("# ok: megatron-core compatibility of mcore_fused\n")
    assert "Subject: mcore_fused, of mcore-compat 0.1.0" in markdown.render(plain)
    assert markdown.render(other).startswith("# ok: megatron-core compatibility of stock\n")
    assert "Subject: stock, judged by mcore-compat 0.1.0" in markdown.render(other)
    assert terminal.summary_line(other).startswith("ok: subject stock, ")
    assert "subject" not in terminal.summary_line(plain)


def test_a_green_run_of_another_subject_is_no_baseline_of_ours(tmp_path):
    plain = build.report(build.result())
    for judged_subject in ("mcore_fused", "stock"):
        told = plain.model_copy(update={"subject": plain.subject.model_copy(update={"judged": judged_subject})})
        folder = tmp_path / judged_subject
        folder.mkdir()
        (folder / "report.json").write_text(told.model_dump_json(), encoding="utf-8")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{}", encoding="utf-8")
    folders = tuple(sorted(tmp_path.iterdir()))
    assert [report.subject.judged for report in known_reports(folders)] == ["mcore_fused"]
    assert [report.subject.judged for report in known_reports(folders, "stock")] == ["stock"]
    assert known_reports(folders, "verl") == ()
