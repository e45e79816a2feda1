"""A covering array really covers: every pair of values that any allowed row has is in some row of the table."""

import ast
from pathlib import Path

from covering import allowed_rows, covering_rows, pairs_of
from hypothesis import given, settings
from hypothesis import strategies as st

GRID = Path(__file__).parents[2] / "compat" / "test_grid.py"


@st.composite
def problems(draw):
    """Factors of two to three values, and pairs that no row may have."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=2, max_size=5))
    factors = {f"f{number}": tuple(range(size)) for number, size in enumerate(sizes)}
    values = [(name, value) for name, options in factors.items() for value in options]
    forbidden = draw(st.lists(st.tuples(st.sampled_from(values), st.sampled_from(values)), max_size=4))
    return factors, [dict(pair) for pair in forbidden if pair[0][0] != pair[1][0]]


def _allows(forbidden):
    return lambda row: not any(all(row[name] == value for name, value in pair.items()) for pair in forbidden)


def _wanted(factors, allowed):
    return set().union(*(pairs_of(row) for row in allowed_rows(factors, allowed)), set())


@settings(max_examples=30)
@given(problems(), st.integers(0, 9))
def test_every_allowed_pair_is_in_some_row(problem, seed):
    factors, forbidden = problem
    allowed = _allows(forbidden)
    rows = covering_rows(factors, allowed, seed)
    assert all(allowed(row) for row in rows)
    assert set().union(*(pairs_of(row) for row in rows), set()) == _wanted(factors, allowed)
    assert rows == covering_rows(factors, allowed, seed), "the table is the same in every process"


def _of_the_grid():
    """Factors and rule of the suite's grid as the newest release has them, without importing Megatron."""
    tree = ast.parse(GRID.read_text(encoding="utf-8"))
    kept = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == "allowed")
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in {"FLAGS", "FACTORS"})
    ]
    everything = {"tensor_parallel", "pipeline", "moe", "mtp", "mup"}
    names = {"_OFFERED": everything, "HAS_MTP": True, "HAS_MUP": True, "MTP_TAKES_PACKED": True, "WORLD": 4}
    exec(compile(ast.Module(kept, []), str(GRID), "exec"), names)
    return names["FACTORS"], names["allowed"]


def test_the_grid_covers_all_pairs_in_few_rows():
    factors, allowed = _of_the_grid()
    rows = covering_rows(factors, allowed)
    assert set().union(*(pairs_of(row) for row in rows)) == _wanted(factors, allowed)
    assert len(rows) <= 14
    for pair in ({"mtp": 1, "tensor": "2"}, {"experts": "two ranks", "pipeline": 2}, {"context": 2, "packed": True}):
        assert any(pair.items() <= row.items() for row in rows), pair
