"""Both sides are built first; each later step has the environment that was built, whatever other gates do."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mcore_compat.gate import built
from mcore_compat.gate.built import build_all
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.records import Environment, EnvironmentFacts, Provisioned
from mcore_compat.verdicts import Verdict

ROOT = Path(__file__).parents[3]
CELLS = tuple(
    cell for cell in load_matrix(ROOT / "compat_matrix" / "matrix.toml").cells if cell.id in {"0.18.2", "0.19.2"}
)
FACTS = EnvironmentFacts(
    python="3.12.1", user_site=False, distributions={}, megatron_roots=(), megatron_files=None, subject_files=None
)


class Lane:
    def __init__(self, folder, refused=()):
        self.environments = folder
        self.refused = refused
        self.made = []
        self.held = []

    def adapted(self, cells):
        return tuple(cells)

    @contextlib.contextmanager
    def hold(self, cell, cancel, say):
        self.held.append(cell.id)
        yield True

    def provision(self, cell):
        self.made.append(cell.id)
        if cell.id in self.refused:
            return Provisioned(1.0, None, Verdict.UNRESOLVABLE, "no compiler", "install one", "the whole output")
        return Provisioned(1.0, Environment(self.environments / cell.id, FACTS, "", reused=False))


@pytest.fixture
def unchanged(monkeypatch):
    answers = {cell.id: True for cell in CELLS}
    monkeypatch.setattr(built, "is_unchanged", lambda cell, *_: answers[cell.id])
    return answers


def test_every_environment_is_made_once_and_before_anything_runs(tmp_path, unchanged):
    lane, said = Lane(tmp_path), []
    made = build_all(lane, CELLS, {}, lambda *words: said.append(words))
    assert lane.made == lane.held == [cell.id for cell in CELLS]
    assert said == [(cell.id, "environment") for cell in CELLS]
    for cell in CELLS:
        assert made.provision(cell).environment.folder == tmp_path / cell.id
    assert len(lane.made) == len(CELLS)


def test_an_environment_that_another_gate_replaced_is_made_again(tmp_path, unchanged):
    lane = Lane(tmp_path)
    made = build_all(lane, CELLS, {}, lambda *_: None)
    unchanged[CELLS[1].id] = False
    for cell in CELLS:
        made.provision(cell)
    assert lane.made == [CELLS[0].id, CELLS[1].id, CELLS[1].id]


def test_a_side_that_cannot_be_built_stops_the_other_one(tmp_path, unchanged):
    lane = Lane(tmp_path, refused={CELLS[1].id})
    made = build_all(lane, CELLS, {}, lambda *_: None)
    first, second = (made.provision(cell) for cell in CELLS)
    assert (second.verdict, second.reason, second.output) == (Verdict.UNRESOLVABLE, "no compiler", "the whole output")
    assert (first.environment, first.verdict) == (None, Verdict.INFRA)
    assert first.reason == "not run, since the other side has no environment: no compiler"
    assert len(lane.made) == len(CELLS)
