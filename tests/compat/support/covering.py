"""Covering arrays: a few rows of settings in which every allowed pair of values of two factors occurs."""

import itertools
import random

_TRIES = 40


def pairs_of(row):
    """The pairs of (factor, value) that a row covers."""
    return frozenset(itertools.combinations(sorted(row.items()), 2))


def allowed_rows(factors, allowed):
    """Every combination of values that is allowed, as dictionaries."""
    names = list(factors)
    rows = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if allowed(row)]


def covering_rows(factors, allowed, seed=0):
    """A small list of allowed rows that covers every pair which any allowed row covers; always the same list.

    Greedy: each row starts from a pair that is still missing, and is the best of some random rows that have it.

    Args:
        factors: values by name.
        allowed: whether a whole row can be run.
        seed: of the random choices.
    """
    choose = random.Random(seed)
    covered_by = [(row, pairs_of(row)) for row in allowed_rows(factors, allowed)]
    missing = set().union(*(pairs for _, pairs in covered_by))
    having = {}
    for entry in covered_by:
        for pair in entry[1]:
            having.setdefault(pair, []).append(entry)
    rows = []
    while missing:
        candidates = having[min(missing, key=repr)]
        tried = [choose.choice(candidates) for _ in range(_TRIES)]
        row, pairs = max(tried, key=lambda entry: len(entry[1] & missing))
        rows.append(row)
        missing -= pairs
    return rows
