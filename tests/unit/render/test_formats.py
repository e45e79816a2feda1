"""One result model, many formats: each is valid by its own rules, bounded, and free of absolute paths."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import JUnitXml
from render_builders import HOSTILE, MIXED, cell, gate, report
from rich.console import Console

from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.errors import ReportError
from mcore_compat.files.scrub import Scrubber, absolute_paths
from mcore_compat.files.untrusted import printable
from mcore_compat.pipeline.run_folder import RunFolder
from mcore_compat.report import gate_text, html, markdown, sarif, terminal
from mcore_compat.report.annotations import PER_LEVEL, render_annotations
from mcore_compat.report.html import Budget, render_page
from mcore_compat.report.junit import render_junit
from mcore_compat.report.readable import unreadable
from mcore_compat.report.timeline import timeline
from mcore_compat.report.write import write_formats, write_run
from mcore_compat.results import CheckResult, Finding, MegatronCore
from mcore_compat.verdicts import Verdict

DATA = Path(__file__).parents[3] / "compat_matrix"
SCHEMA = json.loads((Path(__file__).parent / "data" / "sarif-schema-2.1.0.json").read_text())
TIMELINE = timeline(load_snapshots(DATA / "contracts"), load_rules(DATA / "rules"))
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects what accessibility and self-containment are judged by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.outside: list[str] = []
        self.labels: list[str] = []
        self.tables = self.captions = 0
        self.unscoped = self.scripts = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        if given.get("href", "").startswith("#"):
            self.targets.append(given["href"][1:])
        self.labels += given.get("aria-labelledby", "").split()
        self.outside += [given[name] for name in ("src", "srcset") if name in given]
        self.outside += [given["href"]] if tag == "link" else []
        self.tables += tag == "table"
        self.captions += tag == "caption"
        self.unscoped += tag == "th" and "scope" not in given
        self.scripts += tag == "script"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


@pytest.mark.parametrize("with_gate", [False, True])
def test_the_page_is_whole_self_contained_and_reachable(with_gate):
    text = render_page(MIXED, TIMELINE, gate() if with_gate else None)
    page = Page(text)
    assert not page.open
    assert not page.outside
    assert not page.scripts
    assert "@import" not in text
    assert "url(" not in text
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.targets) <= set(page.ids)
    assert set(page.labels) <= set(page.ids)
    assert page.tables == page.captions
    assert not page.unscoped
    assert '<html lang="en">' in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme:dark" in text
    assert "@@" not in text
    for shown in ("0.17.1", "0.18.2", "unresolvable", "torch conflicts", "Contract timeline", "7"):
        assert shown in text


def test_states_are_told_by_words_and_not_by_colour_alone():
    text = render_page(MIXED)
    assert 'aria-label="0.18.2, mtp: 0 passed, 2 failed, 0 failed as expected, 0 skipped"' in text
    assert "✗ 2" in text
    assert "expected hook" in text  # the cell without a mode


def test_text_in_backticks_is_code_and_titles_end_at_a_word():
    findings = (
        gate().findings[0].model_copy(update={"message": "the hook of `GPTModel` lacks `x<y>` " + "word " * 90}),
    )
    text = render_page(MIXED, (), gate().model_copy(update={"findings": findings}))
    assert "the hook of <code>GPTModel</code> lacks <code>x&lt;y&gt;</code> word" in text
    assert re.search(r"word word…</h3>", text)
    assert "a ` b" in str(html._code("a ` b"))


def test_a_failing_check_leads_to_its_cause():
    text = render_page(MIXED)
    assert "Does mcore_fused work with these 3 megatron-cores?" in text
    numbers = re.findall(r'<a href="#cause-(\d+)">cause', text)
    assert numbers
    assert all(f'id="cause-{number}"' in text for number in numbers)


def test_what_the_cells_of_a_gate_have_beyond_its_findings_is_not_lost():
    lone = gate().model_copy(update={"findings": ()})
    assert "torch conflicts" in render_page(MIXED, (), lone)
    assert any("torch conflicts" in line for line in render_annotations(MIXED, lone))
    assert "torch conflicts" in sarif.render_sarif(MIXED, lone)


def test_hostile_text_stays_text():
    text = render_page(MIXED, TIMELINE, gate())
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        if len(colour) == 4:
            colour = "#" + "".join(c * 2 for c in colour[1:])
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_in_light_and_in_dark():
    """WCAG 2 AA wants 4.5 for text of this size."""
    style = render_page(MIXED)
    light, dark = (dict(re.findall(r"--(\w+):(#[0-9a-f]+)", part)) for part in re.findall(r":root\{(.*?)\}", style))
    for colours in (light, {**light, **dark}):
        for text, ground in (
            ("fg", "bg"),
            ("soft", "bg"),
            ("link", "bg"),
            ("ok", "okb"),
            ("bad", "badb"),
            ("warn", "warnb"),
        ):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def test_the_page_stays_in_its_budget_and_counts_what_is_cut():
    big = report(*(cell(f"c{n}", Verdict.BREAK, failing=60, message=f"{n} " + "x" * 5000) for n in range(20)))
    text = render_page(big, budget=Budget(message=300, failures=10, total=50_000))
    assert len(text) < 700_000
    assert "messages were shortened." in text
    assert "characters cut; report.json has them" in text
    assert "The message is in report.json." in text
    assert "No message was shortened." in render_page(report(cell("a", Verdict.OK)))


@given(st.integers(0, 5), st.integers(0, 3), st.text(max_size=50))
@settings(max_examples=20, deadline=None)
def test_sarif_is_valid_by_the_oasis_schema(failing, findings, message):
    made = report(cell("a", Verdict.BREAK, failing=failing, message=message), cell("b", Verdict.UNRESOLVABLE))
    log = json.loads(sarif.render_sarif(made, gate(findings)))
    jsonschema.Draft4Validator(SCHEMA).validate(log)
    run = log["runs"][0]
    # One result per cause: checks that fail with one message are one, and each of them is named.
    shared = [r for r in run["results"] if r["ruleId"] == "failed-check"]
    assert len(run["results"]) == bool(failing) + 1 + findings
    assert sorted(c for r in shared for c in r["properties"]["checks"]) == [
        f"test_mtp.py::test_{n}" for n in range(failing)
    ]
    assert all(rule["help"]["text"] for rule in run["tool"]["driver"]["rules"])
    assert {result["ruleId"] for result in run["results"]} <= {rule["id"] for rule in run["tool"]["driver"]["rules"]}


def test_the_schema_is_one_that_refuses():
    log = json.loads(sarif.render_sarif(MIXED, gate()))
    log["runs"][0]["results"][0]["level"] = "catastrophe"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SCHEMA).validate(log)


def test_sarif_points_at_upstream_s_line_and_counts_what_is_left_out(monkeypatch):
    log = json.loads(sarif.render_sarif(None, gate()))
    place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "megatron/core/models/gpt/gpt_model.py", "uriBaseId": "MEGATRON"}
    assert place["region"] == {"startLine": 720}
    monkeypatch.setattr(sarif, "MAX_RESULTS", 2)
    run = json.loads(sarif.render_sarif(MIXED, gate(5)))["runs"][0]
    assert len(run["results"]) == 2
    assert "5 results were left out" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]


@given(st.text())
@settings(max_examples=30, deadline=None)
def test_junit_can_be_read_whatever_the_messages_hold(message):
    made = report(cell("a", Verdict.BREAK, failing=1, message=message), cell("b", Verdict.UNRESOLVABLE))
    document = JUnitXml.fromstring(render_junit(made).encode())
    assert (document.tests, document.failures, document.errors, document.skipped) == (7, 1, 1, 2)


def test_a_cell_that_ran_nothing_is_an_error_in_junit():
    root = ET.fromstring(render_junit(report(cell("b", Verdict.UNRESOLVABLE))))
    assert root.find("testsuite/testcase/error") is not None
    assert root.find("testsuite/properties/property[@name='verdict']").get("value") == "unresolvable"


def test_notes_are_errors_nowhere():
    note = Finding(kind="host", message="one GPU")
    told = report(cell("a", Verdict.OK), verdict=Verdict.OK).model_copy(update={"findings": (note,)})
    assert JUnitXml.fromstring(render_junit(told).encode()).errors == 0
    assert [line.partition(" ")[0] for line in render_annotations(told)] == ["::notice"]
    levels = {result["level"] for result in json.loads(sarif.render_sarif(told))["runs"][0]["results"]}
    assert levels == {"note"}
    assert '<span class="tag note">note</span> one GPU' in render_page(told)


def test_annotations_are_escaped_bounded_and_counted():
    lines = render_annotations(MIXED, gate(30))
    assert sum(line.startswith("::error ") for line in lines) == PER_LEVEL
    assert lines[-1].startswith("::notice title=annotations cut::")
    assert re.search(r"::(\d+) more are in the report", lines[-1])[1] == str(30 + 1 + 1 - PER_LEVEL)
    for line in lines:
        assert "\n" not in line
        head = line.split("::")[1]
        assert re.fullmatch(r"(error|warning|notice) ([a-z]+=[^,]*)(,[a-z]+=[^,]*)*", head), head
    assert not render_annotations(report(cell("a", Verdict.OK), verdict=Verdict.OK))


def test_no_format_holds_an_absolute_path(tmp_path):
    path = f"{tmp_path}/cells/x/site-packages/megatron/core/a.py"
    made = report(cell("a", Verdict.BREAK, failing=1, message=f"File {path}, line 3\n/home/me/secret/b.py"))
    scrubber = Scrubber({"tmp": tmp_path})
    written: dict[str, str] = {}
    write_formats(lambda name, text: written.update({name: scrubber.text(text)}), made, DATA, gate())
    assert set(written) == {"report.md", "report.html", "junit.xml", "results.sarif", "annotations.txt"}
    for name, text in written.items():
        assert not absolute_paths(text), name
        assert str(tmp_path) not in text


def test_the_timeline_tells_when_the_hook_came():
    by_version = {transition.version: transition for transition in TIMELINE}
    hook = [e for e in by_version["0.18.0"].events if e.rule == "hook-absent"]
    assert [e.state for e in hook] == ["fixed"]
    assert by_version["0.12.3"].before is None
    assert "gpt hook" in by_version["0.18.0"].modes
    assert HOSTILE not in str(TIMELINE)


ODD_ONES = "\x00\x1b\x0b\x7f\x85\u2028\u202e\ufeff\uffff\ud800\udce9`<>&|:%,\n\r"
ODD = st.text(st.characters() | st.sampled_from(ODD_ONES), max_size=60)


@given(ODD, ODD, ODD)
@settings(max_examples=15, deadline=None)
def test_every_format_can_be_read_whatever_a_cell_says(message, name, version):
    """Names, kinds, properties and labels come from a candidate as much as messages do."""
    odd = cell("a", Verdict.BREAK, failing=1, message=message).model_copy(
        update={
            "megatron_core": MegatronCore(requested="a", distribution=version, attribute=version),
            "device": name,
            "reason": message,
            "findings": (Finding(kind=name or "k", message=message, check=name or None, verdict=Verdict.BREAK),),
            "results": (CheckResult(check=f"{name}::{name}", outcome="failed", expected=False, message=message),),
        }
    )
    side = gate().candidate.model_copy(update={"name": name, "attribute": version, "cell": odd})
    judged = gate().model_copy(update={"candidate": side, "reason": message, "next_step": name})
    made = report(odd)
    files = {
        "report.md": markdown.render(made),
        "gate.md": gate_text.markdown(judged),
        "report.html": render_page(made, (), judged),
        "junit.xml": render_junit(made),
        "results.sarif": sarif.render_sarif(made, judged),
        "annotations.txt": "\n".join(render_annotations(made, judged)),
    }
    assert {file: unreadable(file, text) for file, text in files.items()} == dict.fromkeys(files, "")
    assert printable(gate_text.text(judged)) == gate_text.text(judged)
    assert JUnitXml.fromstring(files["junit.xml"].encode()).failures == 1
    jsonschema.Draft4Validator(SCHEMA).validate(json.loads(files["results.sarif"]))
    sink = io.StringIO()
    Console(file=sink, width=100, color_system=None).print(terminal.render(report(odd)))
    assert printable(sink.getvalue()) == sink.getvalue()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("junit.xml", "<testsuites><testsuite name='a' tests='2'><testcase/></testsuite></testsuites>"),
        ("junit.xml", "<testsuites>\x0b</testsuites>"),
        ("junit.xml", "<testsuites>"),
        ("report.html", "<p><b></p></b>"),
        ("report.html", "<p>"),
        ("report.html", "<a href='#nowhere'></a>"),
        ("report.html", "<p id='a'></p><p id='a'></p>"),
        ("report.html", "<script></script>"),
        ("results.sarif", '{"runs": [{"tool": {"driver": {"rules": []}}, "results": [{"ruleId": "x"}]}]}'),
        ("results.sarif", "{}"),
        ("gate.json", "{"),
        ("gate.json", "NaN"),
        ("report.md", "```text\nx"),
        ("report.md", "a\x1b[31m"),
        ("annotations.txt", "::error title=a::b\nc"),
        ("annotations.txt", "\udce9"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_written(name, text):
    assert unreadable(name, text)


def test_one_format_that_fails_costs_no_other_and_leaves_its_old_file(monkeypatch):
    monkeypatch.setattr("mcore_compat.report.write.render_junit", lambda _: "<testsuites>")
    monkeypatch.setattr("mcore_compat.report.write.render_sarif", lambda *_: 1 / 0)
    found = {"junit.xml": "old"}
    with pytest.raises(ReportError, match=r"junit\.xml \(ParseError.*results\.sarif \(ZeroDivisionError"):
        write_formats(found.__setitem__, MIXED, DATA)
    assert set(found) == {"report.md", "report.html", "junit.xml", "annotations.txt"}
    assert found["junit.xml"] == "old"


def test_paths_leave_before_the_formats_escape(tmp_path):
    """What stands for a path has pointed brackets: put in later it would be an element."""
    run = report(cell("a", Verdict.OK), verdict=Verdict.INFRA)
    lost = Finding(kind="host", message=f"no room in {tmp_path}/cells/x", verdict=Verdict.INFRA)
    folder = RunFolder(tmp_path, Scrubber({"reports": tmp_path}))
    write_run(folder, run.model_copy(update={"findings": (lost,)}), DATA, gate())
    for name in ("report.html", "junit.xml", "results.sarif", "report.md"):
        text = (tmp_path / name).read_text()
        assert not unreadable(name, text)
        assert "no room in" in text
    assert "&lt;reports&gt;/cells/x" in (tmp_path / "junit.xml").read_text()


@pytest.mark.parametrize(("suite", "path"), [("tests/gpu", "tests/gpu/test_mtp.py"), ("", None)])
def test_places_are_those_of_the_suite_that_ran(suite, path):
    """A suite elsewhere has no place in the checkout; a path of another suite would name a file that is not there."""
    made = report(cell("a", Verdict.BREAK, failing=1)).model_copy(update={"suite": suite})
    (error,) = (line for line in render_annotations(made) if line.startswith("::error"))
    assert (f"file={path}," in error) is (path is not None)
    (result,) = json.loads(sarif.render_sarif(made))["runs"][0]["results"]
    places = [p["physicalLocation"]["artifactLocation"]["uri"] for p in result.get("locations", ())]
    assert places == ([path] if path else [])


def test_every_kind_of_finding_is_explained_to_code_scanning():
    """Kinds as the source spells them: a new one without a text would show as a bare name."""
    kind = re.compile(r'(?:kind=|found\(\s*(?:Verdict\.\w+,\s*)?|unproven\(\s*|wrong\(\s*)"([a-z]+(?:-[a-z]+)+)"')
    root = DATA.parent / "src" / "mcore_compat"
    sources = [path for room in ("judge", "pipeline", "gate") for path in (root / room).glob("*.py")]
    used = {name for path in sources for name in kind.findall(path.read_text(encoding="utf-8"))}
    assert len(used) >= 25
    assert used <= sarif.RULE_TEXTS.keys()
    assert all(text.endswith(".") for text in sarif.RULE_TEXTS.values())
