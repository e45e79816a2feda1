"""Whatever parses is read, and whatever is read is judged: no shape of upstream's source ends in a traceback."""

from __future__ import annotations

import ast
from pathlib import Path

from fake_upstream import FILES, edited
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_compat.contract.explain import Comparison, as_json, as_markdown, as_text
from mcore_compat.contract.extract.modules import CandidateSyntaxError
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.compare import check_contract, compare_contracts
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.source.tree import NotMegatronError, SourceTree

RULES = load_rules(Path(__file__).parents[3] / "compat_matrix" / "rules")
BASELINE = extract(edited(), "old")
PYTHON = sorted(path for path in FILES if path.endswith(".py"))


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PYTHON), st.integers(0, 80), st.integers(0, 6), st.sampled_from(["", "async ", "x = ", "    "]))
def test_mangled_source_is_read_or_refused(path, start, length, prefix):
    lines = FILES[path].splitlines()
    start = min(start, len(lines))
    kept = lines[start + length :]
    if prefix and kept:
        kept[0] = f"{prefix}{kept[0].lstrip()}"
    text = "\n".join([*lines[:start], *kept, ""])
    tree = SourceTree("mangled", "directory", {**FILES, path: text})
    try:
        contract = extract(tree, "mangled")
    except CandidateSyntaxError:
        assert not parses(text)
        return
    assert Contract.from_json(contract.to_json()) == contract
    findings = compare_contracts(BASELINE, contract, RULES)
    told = Comparison(BASELINE, contract, findings)
    assert as_text(told, everything=True).startswith("megatron-core old → mangled: ")
    assert as_markdown(told)
    assert as_json(told)
    check_contract(contract, RULES)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from(PYTHON)))
def test_missing_modules_are_read_as_missing(gone):
    files = {path: text for path, text in FILES.items() if path not in gone}
    tree = SourceTree("thin", "directory", files)
    if "megatron/core/__init__.py" in gone:
        try:
            tree.require_megatron()
        except NotMegatronError:
            return
        raise AssertionError
    contract = extract(tree, "thin")
    new = {finding.rule.id for finding in compare_contracts(BASELINE, contract, RULES)}
    if "megatron/core/models/gpt/gpt_model.py" in gone:
        assert "model-missing" in new
        assert contract.value("gpt.class") is None


def test_an_expression_of_any_depth_is_read_or_refused():
    for terms in (300, 1500, 20_000):
        sum_of_many = " + ".join(["1"] * terms)
        tree = edited(("        output_weight = None\n", f"        output_weight = None\n        n = {sum_of_many}\n"))
        try:
            assert extract(tree, "deep").items
        except CandidateSyntaxError as error:
            assert error.next_step  # noqa: PT017  either outcome is right
