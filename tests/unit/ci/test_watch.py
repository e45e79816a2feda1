"""The living issue: every candidate has its line, and text of unknown origin stays text."""

import datetime as dt
import json

from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.releases.watch import Candidate, Note, candidates, issue_body, run_command

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


def test_notes_travel_through_files(tmp_path):
    (tmp_path / "reports" / "run").mkdir(parents=True)
    (tmp_path / "reports" / "run" / "gate.md").write_text("# break\nwhy\n")
    notes = tmp_path / "notes"
    run_command(["note", "--name", "main", "--status", "1", "--out", str(notes / "watch-main")], tmp_path)
    (notes / "broken").mkdir()
    (notes / "broken" / "note.json").write_text("{")
    (notes / "odd").mkdir()
    (notes / "odd" / "note.json").write_text(json.dumps({"name": "../x", "status": 0, "excerpt": ""}))
    listed = json.dumps([vars(Candidate("main", "x"))])
    out = tmp_path / "body.md"
    arguments = ["body", "--notes", str(notes), "--candidates", listed, "--run", RUN, "--out", str(out)]
    assert run_command(arguments, tmp_path) == 0
    assert "| main | no |" in out.read_text()
    assert "# break\nwhy" in out.read_text()
