"""The living issue: every candidate has its line, and text of unknown origin stays text."""

import datetime as dt
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mcore_compat.cli.main import app
from mcore_compat.errors import UsageError
from mcore_compat.releases.watch import Candidate, Note, candidates, candidates_as_json, issue_body

DAY = dt.date(2026, 11, 30)
RUN = "https://example.invalid/run"
names = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)


def test_every_unknown_release_and_main_are_candidates():
    found = candidates(["0.20.0", "0.20.1"])
    assert [candidate.name for candidate in found] == ["release-0.20.0", "release-0.20.1", "main"]
    assert found[0].candidate == "megatron-core==0.20.0"
    assert found[-1].repository.startswith("https://")
    assert [candidate.name for candidate in candidates([])] == ["main"]


@given(
    listed=st.lists(names, min_size=1, max_size=30, unique=True),
    statuses=st.dictionaries(names, st.integers(-1, 9), max_size=30),
    excerpt=st.text(max_size=400),
)
def test_no_candidate_is_lost_and_the_body_fits(listed, statuses, excerpt):
    judged = [Candidate(name, "x") for name in listed]
    notes = {name: Note(name, status, excerpt * 40) for name, status in statuses.items()}
    body = issue_body(judged, notes, RUN, DAY)
    assert len(body) <= 65_536
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    assert len(rows) >= len(listed) + 1
    for name in listed:
        (row,) = [line for line in rows if line.startswith(f"| {name} |")][:1]
        assert ("| yes |" in row) == (notes.get(name) is not None and notes[name].status == 0)


@given(st.text(max_size=300))
def test_an_excerpt_ends_no_fence_and_mentions_nobody(text):
    hostile = "~~~~\n@everyone <img src=x>\n" + text
    body = issue_body([Candidate("main", "x")], {"main": Note("main", 1, hostile)}, RUN, DAY)
    fences = [line for line in body.splitlines() if line.startswith("~~~")]
    assert fences == ["~~~~text", "~~~~"]
    assert "@everyone" not in body


def test_a_job_that_did_not_end_is_no_yes():
    body = issue_body([Candidate("main", "x")], {}, RUN, DAY)
    assert "| main | no answer: its job did not end |" in body


def call(*arguments):
    done = CliRunner().invoke(app, ["watch", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_notes_travel_through_files(tmp_path):
    (tmp_path / "compat_matrix").mkdir()
    (tmp_path / "compat_matrix" / "matrix.toml").touch()
    (tmp_path / "reports" / "run").mkdir(parents=True)
    (tmp_path / "reports" / "run" / "gate.md").write_text("# break\nwhy\n")
    notes = tmp_path / "notes"
    call("note", "--name", "main", "--status", 1, "--out", notes / "watch-main", "--root", tmp_path)
    (notes / "broken").mkdir()
    (notes / "broken" / "note.json").write_text("{")
    (notes / "odd").mkdir()
    (notes / "odd" / "note.json").write_text(json.dumps({"name": "../x", "status": 0, "excerpt": ""}))
    listed = candidates_as_json([Candidate("main", "x")])
    out = tmp_path / "body.md"
    call("body", "--notes", notes, "--candidates", listed, "--run", RUN, "--out", out)
    assert "| main | no |" in out.read_text()
    assert "# break\nwhy" in out.read_text()
    with pytest.raises(UsageError, match="not a list of candidates"):
        call("body", "--notes", notes, "--candidates", "main", "--run", RUN, "--out", out)


def test_candidates_are_the_releases_that_the_matrix_lacks(monkeypatch):
    from mcore_compat.cli import releases as command
    from mcore_compat.releases import Release, ReleaseFile

    file = ReleaseFile("f.whl", "0" * 64, 1)
    fresh = Release("0.99.0", ">=3.12.1", None, None, ("cp312",), sdist=True, source=file)
    monkeypatch.setattr(command, "fetch_releases", lambda: (fresh,))
    listed = json.loads(call("candidates", "--root", Path(__file__).parents[3]))
    assert [entry["name"] for entry in listed] == ["release-0.99.0", "main"]
    assert set(listed[0]) == {"name", "candidate", "repository"}
