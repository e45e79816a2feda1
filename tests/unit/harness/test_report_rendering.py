"""Causes, table and Markdown, from one report."""

import io

import harness_builders as build
import pytest
from rich.console import Console

from mcore_compat.report import markdown, terminal
from mcore_compat.report.causes import causes
from mcore_compat.results import CheckCounts
from mcore_compat.verdicts import Verdict

LABELS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


def run_with(*broken, message="assert {} == 2"):
    cells = [
        build.result(
            label,
            Verdict.BREAK if label in broken else Verdict.OK,
            [build.finding(message.format(number))] if label in broken else [],
            checks=CheckCounts(planned=3, passed=2 if label in broken else 3),
            mode="hook",
        )
        for number, label in enumerate(LABELS)
    ]
    return build.report(*cells)


@pytest.mark.parametrize(
    ("broken", "since"),
    [
        (("0.18.2", "0.19.2"), "since 0.18.2 (0.17.1 is free of it)"),
        (("0.19.2",), "since 0.19.2 (0.18.2 is free of it)"),
        (("0.16.1", "0.17.1"), "up to 0.17.1 (0.18.2 is free of it)"),
        (("0.17.1",), "in 0.17.1 only"),
        (("0.17.1", "0.18.2"), "from 0.17.1 up to 0.18.2 (0.19.2 is free of it)"),
        (("0.16.1", "0.18.2"), "in 0.16.1, 0.18.2"),
        (LABELS, "in every release of this run (4)"),
    ],
)
def test_a_cause_says_since_when(broken, since):
    (cause,) = causes(run_with(*broken))
    assert cause.since == since
    assert cause.cells == broken


def test_failures_that_differ_in_figures_are_one_cause_and_others_are_not():
    assert len(causes(run_with(*LABELS))) == 1
    assert len(causes(run_with(*LABELS, message="assert {0} == 2\nmore {0}"))) == 1
    other = build.result("0.15.3", Verdict.BREAK, [build.finding("another reason")])
    assert len(causes(build.report(*run_with("0.19.2").cells, other))) == 2


def shown(report, width=100):
    sink = io.StringIO()
    Console(file=sink, width=width).print(terminal.render(report))
    return sink.getvalue()


def test_the_terminal_shows_every_cell_and_the_cause():
    text = shown(run_with("0.19.2"))
    for label in LABELS:
        assert label in text
    assert "since 0.19.2" in text
    assert "next: look" in text
    assert text.rstrip().splitlines()[-1].startswith("break (failed): 4 cells (3 ok, 1 break), 11 of 12 checks passed")


def test_a_green_run_is_one_screen():
    text = shown(
        build.report(*(build.result(f"0.{minor}.0", checks=CheckCounts(planned=1, passed=1)) for minor in range(20)))
    )
    assert len(text.splitlines()) <= 24


def test_a_long_reason_takes_no_room_from_the_names():
    text = shown(build.report(build.result(verdict=Verdict.UNRESOLVABLE, reason="because " * 60)), width=80)
    row = next(line for line in text.splitlines() if line.startswith("0.18.2"))
    assert "unresolvable" in row
    assert row.endswith("…")


def test_the_runs_own_findings_are_shown():
    report = build.report(build.result(), findings=[build.finding("cell 0.1 was planned and has no result", None)])
    assert "has no result" in shown(report)
    assert "has no result" in markdown.render(report)


def test_a_note_in_a_red_run_is_not_called_red():
    """What a green check measured stands beside a failure; it must not read like one."""
    measured = build.finding("peak 912 MB", build.CHECKS[1], "measured", None)
    host = build.finding("Host: 1 x <gpu>", None, "image", None)
    lost = build.finding("no room", None, "image-changed", Verdict.INFRA)
    red = build.result(verdict=Verdict.BREAK, findings=[measured, build.finding()])
    report = build.report(red, findings=[host, lost])
    assert [(cause.level, cause.headline) for cause in causes(report)] == [
        ("break", "assert 1 == 2"),
        ("infra", "no room"),
        ("note", "peak 912 MB"),
        ("note", "Host: 1 x <gpu>"),
    ]
    lines = shown(report, 160).splitlines()
    assert f"note: {build.CHECKS[1]}: peak 912 MB; in every release of this run (1)" in lines
    assert "note: Host: 1 x <gpu>; in the run itself" in lines
    assert not [line for line in lines if "break" in line and ("peak" in line or "Host" in line)]
    text = markdown.render(report)
    assert text.index("## no room") < text.index("## Notes") < text.index(f"- {build.CHECKS[1]}: peak 912 MB; ")
    assert text.count("## Notes") == 1
    assert "- Host: 1 x &lt;gpu&gt;; in the run itself\n" in text


def test_many_notes_are_counted():
    notes = [build.finding(f"note {chr(97 + number)}", None, "measured", None) for number in range(11)]
    lines = shown(build.report(build.result(findings=notes))).splitlines()
    assert sum(line.startswith("note: ") for line in lines) == 8
    assert "… and 3 more notes in report.md" in lines


def test_a_note_keeps_its_link():
    known = build.finding("fails as declared: upstream", build.CHECKS[0], "as-declared", None)
    linked = known.model_copy(update={"link": "https://example.org/thread"})
    assert "[more](https://example.org/thread)" in markdown.render(build.report(build.result(findings=[linked])))


def test_markdown_escapes_and_names_the_next_step():
    report = build.report(build.result(verdict=Verdict.BREAK, reason="a|b <c>", findings=[build.finding("x ``` y")]))
    text = markdown.render(report)
    assert "a\\|b &lt;c&gt;" in text
    assert "Next step: look" in text
    assert text.count("```") == 2


def test_markdown_stays_below_the_limit_and_counts_what_is_left_out():
    words = [chr(97 + number // 20) + chr(97 + number % 20) for number in range(200)]
    findings = [build.finding(f"{word} word " * 200, f"test_a.py::test_{word}") for word in words]
    text = markdown.render(build.report(build.result(verdict=Verdict.BREAK, findings=findings)))
    assert len(text) < 65_000
    assert "of 200 causes are left out here" in text
