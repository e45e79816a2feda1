"""Reproducers run in the environments that were judged, and no other run may change those meanwhile."""

import contextlib
from pathlib import Path

import pytest

from mcore_compat.gate import run as gate_run
from mcore_compat.gate.witness import Lines, Outcome
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.records import Environment, EnvironmentFacts, Provisioned
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]
CELL = load_matrix(ROOT / "compat_matrix" / "matrix.toml").cells[0]
FACTS = EnvironmentFacts(
    python="3.12.1", user_site=False, distributions={}, megatron_roots=(), megatron_files=None, subject_files=None
)


class Lane:
    def __init__(self, provisioned):
        self.provisioned = provisioned
        self.events = []

    @contextlib.contextmanager
    def hold(self, cell, cancel, say):
        self.events.append("held")
        yield True
        self.events.append("released")

    def provision(self, cell):
        self.events.append("verified")
        return self.provisioned


@pytest.fixture
def ran(monkeypatch):
    folders = []

    def run_witnesses(lines, cell, folder, host, cancel):
        folders.append(folder)
        lane.events.append("run")
        return [Outcome("pass") for _ in lines]

    lane = Lane(None)
    monkeypatch.setattr(gate_run, "run_witnesses", run_witnesses)
    return lane, folders


def test_the_cell_is_held_and_verified_while_reproducers_run(ran, tmp_path):
    lane, folders = ran
    lane.provisioned = Provisioned(1.0, Environment(tmp_path / "cell", FACTS, "", reused=True))
    assert gate_run._reproduced([Lines("pass")], CELL, lane, {}) == [Outcome("pass")]
    assert lane.events == ["held", "verified", "run", "released"]
    assert folders == [tmp_path / "cell"]


def test_reproducers_do_not_run_where_the_environment_is_gone(ran):
    lane, folders = ran
    lane.provisioned = Provisioned(1.0, None, Verdict.INFRA, "no disk", "make room")
    (outcome,) = gate_run._reproduced([Lines("pass")], CELL, lane, {})
    assert (outcome.result, folders) == ("error", [])
    assert lane.events == ["held", "verified", "released"]
