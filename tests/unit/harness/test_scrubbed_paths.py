"""No absolute path in any artefact."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.files.scrub import Scrubber, absolute_paths

ROOTS = {
    "root": Path("/srv/checkout"),
    "cells": Path("/srv/checkout/.cells"),
    "tmp": Path("/tmp"),
    "home": Path("/root"),
}
SCRUBBER = Scrubber(ROOTS)

part = st.text(alphabet="abcXYZ019._-", min_size=1, max_size=8).filter(lambda text: text.strip("."))
known = st.tuples(st.sampled_from(list(ROOTS.values())), st.lists(part, max_size=4)).map(
    lambda pair: "/".join([str(pair[0]), *pair[1]])
)
foreign = st.tuples(st.sampled_from(["/home", "/usr", "/opt", "/builds", "/Users"]), st.lists(part, min_size=1)).map(
    lambda pair: "/".join([pair[0], *pair[1]])
)


@given(st.lists(st.one_of(known, foreign), min_size=1), st.sampled_from([" ", '"', "'", "\n", ": ", "(", "=", ","]))
def test_no_path_is_left(paths, separator):
    text = separator + separator.join(paths) + " end"
    clean = SCRUBBER.text(text)
    assert absolute_paths(clean) == ()
    assert not any(str(root) + "/" in clean for root in ROOTS.values())
    assert SCRUBBER.text(clean) == clean


def test_the_longest_root_wins_and_the_rest_is_kept():
    assert SCRUBBER.text("/srv/checkout/.cells/0.18.2/venv") == "<cells>/0.18.2/venv"
    assert SCRUBBER.text("/usr/lib/python3.12/json/decoder.py:1") == "<…>/json/decoder.py:1"


def test_what_is_no_path_stays():
    text = "https://github.com/home/x, a/b/c, 1/2, <root>/src/x.py, and/or, ~/home/x"
    assert SCRUBBER.text(text) == text


def test_who_logs_in_is_taken_out_of_urls():
    secret = (
        "git+https://user:ghp_x@github.com/o/r@main, https://__token__:pypi-x@host/simple, https://ghp_x@github.com"
    )
    clean = SCRUBBER.text(secret)
    assert clean == "git+https://<…>@github.com/o/r@main, https://<…>@host/simple, https://<…>@github.com"
    assert SCRUBBER.text(clean) == clean
    for text in ("git+ssh://git@github.com/o/r@main", "git+file:///repository@ref", "https://github.com/o/r@v1, a@b.c"):
        assert SCRUBBER.text(text) == text


def test_data_of_any_depth(tmp_path):
    assert SCRUBBER.data({"a": ["/tmp/x", {"b": ("/root/y", 1, None)}]}) == {
        "a": ["<tmp>/x", {"b": ["<home>/y", 1, None]}]
    }
    log = tmp_path / "log"
    log.write_text("in /srv/checkout/x\n", encoding="utf-8")
    SCRUBBER.file(log)
    assert log.read_text(encoding="utf-8") == "in <root>/x\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
