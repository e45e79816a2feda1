"""The committed contracts say about the real releases what is known of them."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_compat.contract.extract.surface import SYMBOLS, extract
from mcore_compat.contract.model import Contract, ContractFormatError, VersionLabels
from mcore_compat.contract.rules.classes import class_names, equivalence_classes
from mcore_compat.contract.rules.compare import (
    FindingState,
    check_contract,
    compare_contracts,
    expected_modes,
    level_of,
)
from mcore_compat.contract.rules.rule import RuleError, load_rules
from mcore_compat.contract.snapshots import NoSnapshotError, load_snapshot, load_snapshots
from mcore_compat.contract.source.candidate import open_candidate, parse_candidate
from mcore_compat.releases import load_releases

ROOT = Path(__file__).parents[3]
DATA = ROOT / "compat_matrix"
RULES = load_rules(DATA / "rules")
CONTRACTS = load_snapshots(DATA / "contracts")


def new(before: str, after: str, *levels: str) -> set[str]:
    found = compare_contracts(CONTRACTS[before], CONTRACTS[after], RULES)
    return {f.rule.id for f in found if f.state is FindingState.NEW and f.level in levels}


def test_every_release_that_should_be_there_is():
    releases = [r for r in load_releases(DATA / "releases.json") if r.refusal("3.12") is None]
    expected = {
        r.version for r in releases if not r.parsed.is_prerelease and r.parsed >= releases[0].parsed.__class__("0.12.3")
    }
    assert set(CONTRACTS) == expected


def test_the_hook_came_with_018_and_going_back_loses_it():
    assert "hook-absent" in new("0.18.0", "0.17.1", "drift")
    assert not new("0.17.1", "0.18.0", "break")
    assert expected_modes(CONTRACTS["0.17.1"])["gpt"] == "legacy"
    assert expected_modes(CONTRACTS["0.18.0"]) == {"gpt": "hook", "hybrid": "legacy", "mamba": "legacy"}


@pytest.mark.parametrize(
    ("old", "later"),
    [("0.13.0", "0.13.1"), ("0.15.0", "0.15.3"), ("0.16.0", "0.16.1"), ("0.17.0", "0.17.1"), ("0.18.0", "0.18.2"),
     ("0.19.0", "0.19.2")],
)  # fmt: skip
def test_patch_releases_are_silent(old, later):
    assert not new(old, later, "break", "drift")


def test_mtp_counts_accepted_tokens_since_019():
    assert not new("0.18.2", "0.19.0", "break")  # the deferred head answers this one
    assert any("acceptance" in str(entry) for entry in CONTRACTS["0.19.0"].value("mtp.logits"))


def test_no_release_breaks():
    for contract in CONTRACTS.values():
        assert not [f.key for f in check_contract(contract, RULES) if f.level == "break"], contract.name


def test_classes_are_a_partition_along_the_history():
    groups = equivalence_classes(CONTRACTS, RULES)
    assert [m for g in groups for m in g.members] == list(CONTRACTS)
    assert len(groups) <= 8
    assert len(set(class_names(CONTRACTS, RULES).values())) == len(groups)
    for group in groups:
        for one, other in pairwise(group.members):
            assert not new(one, other, "break")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CONTRACTS)), st.sampled_from(sorted(CONTRACTS)))
def test_what_is_new_one_way_is_fixed_the_other_way(one, other):
    def keys(before, after, state):
        found = compare_contracts(CONTRACTS[before], CONTRACTS[after], RULES)
        return {f.key for f in found if f.state is state and not f.rule.is_change}

    assert keys(one, other, FindingState.NEW) == keys(other, one, FindingState.FIXED)
    assert level_of(compare_contracts(CONTRACTS[one], CONTRACTS[one], RULES)) is None


def test_snapshots_are_stable_text():
    for name, contract in CONTRACTS.items():
        text = (DATA / "contracts" / f"{name}.json").read_text()
        assert contract.to_json() == text
        assert len(text) < 30_000


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 99}', '{"schema_version": 1, "items": 3}', "[1]"])
def test_damaged_snapshots_are_named(text):
    with pytest.raises(ContractFormatError, match=r"x\.json"):
        Contract.from_json(text, "x.json")


def test_names_that_are_no_versions_lead_nowhere(tmp_path):
    with pytest.raises(NoSnapshotError):
        load_snapshot(tmp_path, "../../etc/passwd")
    with pytest.raises(NoSnapshotError, match="there are: none"):
        load_snapshot(tmp_path, "9.9.9")


def test_labels_that_disagree_are_shown_side_by_side():
    labels = VersionLabels("0.19.0", "0.19.1", "abc" * 14)
    assert labels.disagree
    assert labels.describe() == "distribution 0.19.0, __version__ 0.19.1, commit abcabcabcabc"
    assert VersionLabels(None, "0.20.0").describe().startswith("distribution has no metadata")


def test_the_hook_rule_names_what_the_processor_needs():
    source = (ROOT / "src/mcore_fused/modes/hook.py").read_text()
    names, required = _assigned(source, "HOOK_KEYWORDS"), _assigned(source, "REQUIRED_KEYWORDS")
    count = next(n.value for n in ast.walk(required) if isinstance(n, ast.Constant) and isinstance(n.value, int))
    rule = next(rule for rule in RULES if rule.id == "hook-keyword-missing")
    assert sorted(rule.arguments["names"]) == sorted(ast.literal_eval(names)[:count])


def _assigned(source: str, name: str) -> ast.expr:
    return next(
        node.value for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name
    )  # fmt: skip


def test_whatever_the_library_imports_of_megatron_is_in_the_contract():
    imported = set()
    for path in (ROOT / "src/mcore_fused").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    covered = set(SYMBOLS) | {name.rpartition(".")[0] for name in SYMBOLS}
    assert imported
    assert imported <= covered


def test_a_gpt_inside_llava_gets_packed_sequences_on_every_release():
    """Up to 0.15 there is a second call, for a MambaModel, without them: reading it alone said what is not so."""
    for name, contract in CONTRACTS.items():
        assert "packed_seq_params" in contract.value("llava.language_model"), name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "missing key"),
        ('id = "x"\nlevel = "bad"\n', r"x\.toml"),
        ('check = "no-such"\n', r"x\.toml"),
    ],
)
def test_wrong_rule_files_are_named(tmp_path, text, problem):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(RuleError, match=problem):
        load_rules(tmp_path)
    with pytest.raises(RuleError, match="no rules"):
        load_rules(tmp_path / "nowhere")


@pytest.mark.network
@pytest.mark.parametrize("version", ["0.13.1", "0.19.2"])
def test_a_release_read_again_gives_its_committed_contract(version):
    releases = load_releases(DATA / "releases.json")
    fresh = extract(open_candidate(parse_candidate(version), releases), version)
    assert fresh.to_json() == (DATA / "contracts" / f"{version}.json").read_text()
