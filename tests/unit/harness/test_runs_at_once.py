"""Several runs at once in one folder of environments, or in one cache: none disturbs another."""

import subprocess
import threading
import time

import pytest

from mcore_compat.contract.source import candidate
from mcore_compat.contract.source.candidate import Candidate, CandidateKind, open_candidate
from mcore_compat.files import sealed

RUNS = 6


def at_once(job):
    """What each of several threads gets that start a job together."""
    results, together = [], threading.Barrier(RUNS)

    def run(number):
        together.wait()
        try:
            results.append(job(number))
        except Exception as error:  # noqa: BLE001
            results.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(RUNS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_runs_that_seal_one_suite_share_one_copy(tmp_path, monkeypatch):
    """Whoever finds no copy puts one in place; nobody removes the one that another run has begun to use."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_a.py").write_text("", encoding="utf-8")
    look = sealed.is_sealed

    def slow(folder, digest):
        found = look(folder, digest)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(sealed, "is_sealed", slow)

    def run(_):
        copy, digest = sealed.sealed_copy(tmp_path, [tmp_path / "suite"], tmp_path / "store")
        for _ in range(20):
            assert look(copy, digest), "the copy was taken away"
            time.sleep(0.02)
        return copy

    copies = at_once(run)
    assert len(set(copies)) == 1, copies
    assert [path.name for path in (tmp_path / "store").iterdir() if path.is_dir()] == [copies[0].name]


@pytest.fixture
def remote(tmp_path):
    """A repository with a branch for each run."""
    folder = tmp_path / "upstream"
    (folder / "megatron" / "core").mkdir(parents=True)

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, "-C", folder, *words], check=True, capture_output=True)

    git("init", "--quiet")
    for number in range(RUNS):
        (folder / "megatron" / "core" / "__init__.py").write_text(f"RUN = {number}\n", encoding="utf-8")
        git("add", ".")
        git("commit", "--quiet", "-m", f"{number}")
        git("branch", f"run-{number}")
    return folder


def test_each_run_reads_the_ref_that_it_asked_for(remote, tmp_path, monkeypatch):
    """All fetch from one repository on another host into one cache, and read when the others have fetched too."""
    fetched, read = threading.Barrier(RUNS, timeout=60), candidate.read_git

    def read_late(*words):
        fetched.wait()
        return read(*words)

    monkeypatch.setattr(candidate, "read_git", read_late)

    def run(number):
        asked = Candidate(CandidateKind.GIT, f"upstream@run-{number}", "", address=remote.as_uri(), ref=f"run-{number}")
        return number, open_candidate(asked, (), tmp_path / "cache").files["megatron/core/__init__.py"]

    found = at_once(run)
    assert sorted(found) == [(number, f"RUN = {number}\n") for number in range(RUNS)]
