"""Use lists, who-breaks, patch files, expectations, the outputs and the command line."""

import datetime as dt
import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner
from usage_builders import MemoryCache, adopter, extracted, megatron, side

from mcore_compat.cli.main import app
from mcore_compat.contract.scan import branches
from mcore_compat.contract.source.candidate import parse_candidate
from mcore_compat.errors import ExpectationError, UsageError
from mcore_compat.usage.bisect import with_first_commits
from mcore_compat.usage.downstreams import assess_all
from mcore_compat.usage.expectations import apply_expectations, load_usage_expectations
from mcore_compat.usage.findings import Severity
from mcore_compat.usage.gate_findings import usage_findings
from mcore_compat.usage.matrix import assess
from mcore_compat.usage.patch_files import check_patches
from mcore_compat.usage.render import matrix_as_text, report_as_json, report_as_sarif, report_as_text
from mcore_compat.usage.shipped import shipped_versions
from mcore_compat.usage.sources import open_source
from mcore_compat.usage.targets import known_releases, named_megatrons
from mcore_compat.usage.use_lists import UseList, UseListError, load_sources, load_use_lists, save_use_list
from mcore_compat.usage.who_breaks import branch_breaks, commit_of_pull_request, commits_of, who_breaks

LISTS = Path(__file__).parents[3] / "compat_matrix" / "downstreams"
SOURCE = """
    from megatron.core.m import C, f
    try:
        from megatron.core import other
    except ImportError:
        other = None
    class D(C):
        def go(self, x, *, y=1): super().go(x)
    a, b = f(1, k=2)
"""
M = "megatron/core/m.py"
GOOD = {M: "def f(a, k=1): return 1, 2\nclass C:\n  def go(self, x, *, y=1): ...\n"}
BAD = {M: "def f(a): return 1, 2\ndef f_new(a, k=1): ...\nclass C:\n  def go(self, x, *, y=1): ...\n"}
GONE = {M: "def new_f(a, k=1): ...\nclass C:\n  def go(self, x, *, y=1): ...\n"}


def report(*labelled, **more):
    return assess(extracted(SOURCE), [side(files, label) for label, files in labelled], **more)


def test_a_list_says_the_same_after_it_was_written(tmp_path):
    uses = UseList(extracted(SOURCE), "0.18.2")
    save_use_list(tmp_path, uses)
    [again] = load_use_lists(tmp_path)
    assert again == uses


def test_a_damaged_list_is_an_error(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UseListError, match="is not a use list"):
        load_use_lists(tmp_path)
    with pytest.raises(UseListError, match="no use list of any"):
        load_use_lists(tmp_path, ["y"])


def test_the_committed_lists_are_those_of_the_sources():
    lists = load_use_lists(LISTS)
    assert {one.name for one in lists} == {one.name for one in load_sources(LISTS)}
    assert all(one.extracted.uses for one in lists)
    assert not any(use.file.startswith("/") for one in lists for use in one.extracted.uses)


def test_first_bad_last_good_and_what_there_is_instead():
    result = report(("1", GOOD), ("2", GOOD), ("3", GONE), ("4", GONE))
    assert [column.severity for column in result.columns] == [None, None, Severity.IMPORT, Severity.IMPORT]
    [finding] = result.columns[3].findings
    assert (finding.good, finding.first_bad, finding.against) == ("2", "3", "4")
    assert result.columns[1].reference
    assert not result.clean
    text = report_as_text(result)
    assert "acme/train.py:2: fails at import: core.m.f does not exist." in text
    assert text.count("acme/train.py:2") == 1  # the next column does not repeat it
    assert "1 findings as above" in text


def test_a_new_name_beside_the_old_one_is_suggested():
    [finding] = report(("1", GOOD), ("2", {M: GOOD[M].replace("def f(", "def f_fused(")})).columns[1].findings
    assert finding.symbol == "megatron.core.m.f"
    moved = report(("1", GOOD), ("2", {M: GOOD[M].replace("def f(", "def g("), "megatron/core/n.py": "def f(): ..."}))
    assert moved.columns[1].findings[0].replacement == ("megatron.core.n.f",)


def test_the_pin_decides_what_is_compared():
    result = report(("1", GOOD), ("2", BAD), pin="2")
    assert [column.reference for column in result.columns] == [False, True]


def test_json_and_sarif():
    result = report(("1", GOOD), ("2", BAD))
    assert json.loads(report_as_json(result))["columns"][1]["findings"][0]["rule"] == "call-does-not-fit"
    sarif = json.loads(report_as_sarif(result))["runs"][0]
    [found] = sarif["results"]
    place = found["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("acme/train.py", 9)
    assert found["level"] == "error"


def expectations(tmp_path, **more):
    entry = {"symbol": "megatron.core.m.f", "reason": "known and accepted", "expires": "2030-01-01"} | more
    body = "".join(f"{key} = {value if key == 'expires' else json.dumps(value)}\n" for key, value in entry.items())
    path = tmp_path / "expectations.toml"
    path.write_text(f"schema_version = 1\n[[expectation]]\n{body}")
    return path


def test_an_expectation_silences_and_a_stale_one_is_red(tmp_path):
    result = report(("1", GOOD), ("2", BAD))
    today = dt.date(2029, 1, 1)
    live = apply_expectations(result, load_usage_expectations(expectations(tmp_path)), today)
    assert live.clean
    assert json.loads(report_as_sarif(live))["runs"][0]["results"][0]["suppressions"]
    for more in ({"symbol": "megatron.core.unused"}, {"expires": "2028-01-01"}):
        stale = apply_expectations(result, load_usage_expectations(expectations(tmp_path, **more)), today)
        assert stale.stale
        assert not stale.clean
    unused = apply_expectations(report(("1", GOOD)), load_usage_expectations(expectations(tmp_path)), today)
    assert unused.columns[0].findings == ()
    assert not unused.clean
    with pytest.raises(ExpectationError):
        load_usage_expectations(expectations(tmp_path, reason="short"))


PATCH = """--- a/megatron/core/m.py
+++ b/megatron/core/m.py
@@ -1,3 +1,4 @@
 one
-two
+2
+2.5
 three
--- a/megatron/core/gone.py
+++ b/megatron/core/gone.py
@@ -1 +1 @@
-x
+y
--- /dev/null
+++ b/megatron/core/new.py
@@ -0,0 +1 @@
+z
"""


@pytest.mark.parametrize(("text", "lines"), [("zero\none\ntwo \nthree\n", [11]), ("one\nTWO\nthree\n", [3, 11])])
def test_each_hunk_of_a_patch_file(text, lines):
    tree = megatron({M: text})
    found = check_patches([("docker/megatron.patch", PATCH)], tree)
    assert [finding.line for finding in found] == lines
    assert {finding.severity for finding in found} == {Severity.PATCH_FILE}


def git(folder, *arguments):
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "Megatron-LM"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("")
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    for number, files in enumerate([GOOD, {"megatron/core/z.py": "z = 1\n"}, BAD, GONE, {"megatron/core/z.py": ""}]):
        for path, text in files.items():
            (folder / path).write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"Change {number} (#{number})")
    return folder


def test_whom_each_commit_breaks(clone):
    uses = [UseList(extracted(SOURCE))]
    found = list(who_breaks(clone, commits_of(clone, "main~4", "main"), uses, MemoryCache()))
    assert [(b.title.split(" ", 2)[2], b.findings[0].rule) for b in found] == [
        ("Change 2 (#2)", "call-does-not-fit"),
        ("Change 3 (#3)", "missing-import"),
    ]
    assert commit_of_pull_request(clone, 3) == found[1].commit
    with pytest.raises(UsageError, match="no commit that names"):
        commit_of_pull_request(clone, 77)


def test_branches_are_judged_against_where_they_began(clone):
    git(clone, "checkout", "-q", "-b", "pull", "main~4")
    for path, text in GONE.items():
        (clone / path).write_text(text)
    git(clone, "commit", "-qam", "Remove f")
    git(clone, "update-ref", "refs/pull/7/head", "pull")
    uses = [UseList(extracted(SOURCE))]
    found = branch_breaks(clone, branches(clone, ["refs/pull/*/head"], ["main"]), uses, MemoryCache())
    [breakage] = found
    assert "pull/7/head" in breakage.title
    assert breakage.findings[0].rule == "missing-import"


def test_a_revert_of_what_broke_is_not_another_breakage(clone):
    moved = {M: GOOD[M].replace("def f(a, k=1)", "def f(k, a=1)")}
    for number, files in enumerate([GOOD, moved, GOOD, moved], start=5):
        for path, text in files.items():
            (clone / path).write_text(text)
        git(clone, "commit", "-qam", f"Change {number} (#{number})")
    uses = [UseList(extracted("from megatron.core.m import f\nf(1)\n"))]
    found = list(who_breaks(clone, commits_of(clone, "main~3", "main"), uses, MemoryCache()))
    assert [(b.title.split(" ", 2)[2], b.findings[0].rule) for b in found] == [
        ("Change 6 (#6)", "argument-moved"),
        ("Change 8 (#8)", "argument-moved"),
    ]


def test_the_first_bad_commit_is_named(clone):
    git(clone, "tag", "core_v0.1", "main~4")
    git(clone, "tag", "core_v0.2", "main")
    cache = MemoryCache()
    result = assess(extracted(SOURCE), [side(GOOD, "0.1"), side(GONE, "0.2")])
    dated = with_first_commits(result, extracted(SOURCE), clone, cache)
    assert dated.columns[1].findings[0].commit.endswith("Change 3 (#3)")


def test_all_lists_against_all_megatrons():
    uses = UseList(extracted(SOURCE), "2")
    reports = assess_all([uses], [side(GOOD, "1"), side(GOOD, "2"), side(BAD, "3")])
    assert [column.reference for column in reports[0].columns] == [False, True, False]
    assert "1 impo" in matrix_as_text(reports)


def test_what_the_gate_asks(tmp_path):
    home = tmp_path / "acme"
    home.mkdir()
    (home / "train.py").write_text("from megatron.core.m import f\nf(1, k=2)\n")
    sides = {}
    for name, files in (("old", GOOD), ("new", BAD)):
        for path, text in {"megatron/core/__init__.py": "", **files}.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        sides[name] = parse_candidate(str(tmp_path / name))
    [finding] = usage_findings(home, sides["new"], sides["old"], cache=MemoryCache())
    assert finding.where == "train.py:2"
    assert usage_findings(home, sides["old"], cache=MemoryCache()) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.17..0.18", ["0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.18.2"]),
        ("0.16", ["0.16.1"]),
        ("0.18.2,0.17.1", ["0.18.2", "0.17.1"]),
    ],
)
def test_names_of_megatrons(text, expected):
    assert [candidate.label for candidate in named_megatrons([text], known_releases())] == expected


def test_every_final_release_has_an_index():
    finals = {c.label for c in named_megatrons(["0.12.."], known_releases())}
    assert finals <= set(shipped_versions())
    result = CliRunner().invoke(app, ["usage-index", "--check"])
    assert result.exit_code == 0, result.output
    assert "releases have an index" in result.output


def test_the_commands(tmp_path):
    run = CliRunner().invoke
    (tmp_path / "a.py").write_text("from megatron.core.parallel_state import is_inside_encoder\n")
    shown = run(app, ["uses", str(tmp_path)])
    assert shown.exit_code == 0
    assert "a.py:1: import      megatron.core.parallel_state.is_inside_encoder" in shown.output
    good = run(app, ["check", str(tmp_path), "--against", "0.13.1"])
    assert (good.exit_code, "0.13.1 (reference): fine" in good.output) == (0, True)
    bad = run(app, ["check", str(tmp_path), "--against", "0.13.1,0.14.0"])
    assert bad.exit_code == 1
    assert "since 0.14.0, 0.13.1 is free of it" in bad.output
    assert isinstance(run(app, ["check", str(tmp_path / "nothing")]).exception, UsageError)
    assert isinstance(run(app, ["who-breaks", str(tmp_path)]).exception, UsageError)


def test_a_folder_without_python_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no Python files"):
        open_source(str(tmp_path))
    assert adopter("import megatron").total == 1
