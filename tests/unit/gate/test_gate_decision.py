"""What is new, fixed, the same or flaky; and what the gate says of it."""

from __future__ import annotations

import pytest
from gate_builders import RAN, cell, contract_finding, side
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_compat.gate.compare import contract_change, excused, pair_cells
from mcore_compat.gate.decide import decide, next_step_of
from mcore_compat.gate.model import GateReport, Tier
from mcore_compat.report.annotations import render_annotations
from mcore_compat.report.causes import gate_causes
from mcore_compat.report.gate_text import markdown, text
from mcore_compat.report.sarif import render_sarif
from mcore_compat.results import CheckResult, Finding, signature
from mcore_compat.verdicts import Verdict

CHECKS = st.dictionaries(st.sampled_from(["a.py::t", "b.py::t", "c.py::t"]), st.sampled_from(["x", "y"]))


@settings(deadline=None)
@given(CHECKS, CHECKS)
def test_pairing_is_set_arithmetic_over_checks(before, after):
    found = {f.title: f.state for f in pair_cells(cell("old", failures=before), cell("new", failures=after))}
    other = {check for check in before.keys() & after.keys() if before[check] != after[check]}
    assert {t for t, s in found.items() if s == "new"} == (after.keys() - before.keys()) | other
    assert {t for t, s in found.items() if s == "fixed"} == before.keys() - after.keys()
    assert {t for t, s in found.items() if s == "same"} == (before.keys() & after.keys()) - other


@settings(deadline=None)
@given(CHECKS, CHECKS, CHECKS, CHECKS)
def test_whatever_differs_in_the_second_run_is_flaky_and_never_green(before, after, again_before, again_after):
    first = cell("old", failures=before), cell("new", failures=after)
    second = cell("old", failures=again_before), cell("new", failures=again_after)
    found = pair_cells(*first, second)
    for finding in found:
        name = finding.title
        state = pair_state(before.get(name), after.get(name))
        if state != "same":
            assert (finding.state == "flaky") is (pair_state(again_before.get(name), again_after.get(name)) != state)
    assert {f.title for f in found} == before.keys() | after.keys() | again_before.keys() | again_after.keys()
    verdict, _ = decide(side("old", first[0]), side("new", first[1]), RAN, found)
    if any(f.state == "flaky" for f in found):
        assert not verdict.green
    if any(f.state == "new" for f in found):
        assert verdict is Verdict.BREAK


def pair_state(before, after):
    """Said by hand: what one check's messages on both sides make of it."""
    if after is None:
        return None if before is None else "fixed"
    return "same" if before == after else "new"


def test_a_failure_for_another_reason_is_new_and_says_so():
    """A declared TypeError on the baseline is no excuse for a wrong number on the candidate."""
    (finding,) = pair_cells(
        cell("old", failures={"a.py::t": "KeyError: x"}), cell("new", failures={"a.py::t": "OSError"})
    )
    assert finding.state == "new"
    assert finding.witness_note == "the baseline fails it too, for another reason: KeyError: x"
    declared, wrong = _declared("0.18.2"), cell("candidate", failures={"a.py::t": "log_probs differs by 2.35"})
    found = pair_cells(declared, wrong)
    assert [f.state for f in found] == ["new"]
    assert decide(side("old", declared), side("new", wrong), RAN, found)[0] is Verdict.BREAK


def test_two_findings_of_one_kind_are_two():
    def lost(*messages):
        findings = [Finding(kind="no-evidence", message=message, verdict=Verdict.UNPROVEN) for message in messages]
        return cell("x", Verdict.UNPROVEN, findings=tuple(findings))

    found = pair_cells(lost("nothing was counted for hook_calls"), lost("no process imported megatron"))
    assert {f.message: f.state for f in found} == {
        "nothing was counted for hook_calls": "fixed",
        "no process imported megatron": "new",
    }


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_decision_is_green_while_only_the_candidates_cell_is_red(data):
    """Whatever the findings are, also none: a bug in the pairing must not become a reason to move."""
    old, new = (
        cell(name, data.draw(st.sampled_from(list(Verdict))), failures=data.draw(CHECKS), reason=name)
        for name in ("old", "new")
    )
    if data.draw(st.booleans()):
        old = old.model_copy(update={"results": tuple(r.model_copy(update={"expected": True}) for r in old.results)})
    paired = pair_cells(old, new)
    kept = data.draw(st.lists(st.sampled_from(paired), unique_by=lambda f: f.title)) if paired else []
    verdict, reason = decide(side("old", old), side("new", new), RAN, kept)
    judged = excused(new, old)
    if verdict.green:
        assert not (old.verdict.green and not judged.verdict.green), reason
    # What the excuse leaves green is declared on the baseline, word for word.
    if judged.verdict.green and not new.verdict.green:
        declared = {r.check: r.message for r in old.results if r.expected}
        assert all(declared[r.check] == r.message for r in new.results)


def test_stock_that_computes_something_else_is_drift():
    """Another default of upstream's changes nothing for us, and everything for whoever trains."""
    old, new = (
        cell("old", stock={"log-probs": (1.0, 2.0)}),
        cell("new", stock={"log-probs": (1.0, 2.5), "more": (1.0,)}),
    )
    (finding,) = found = pair_cells(old, new)
    assert (finding.state, finding.level) == ("new", "drift")
    verdict, reason = decide(side("old", old), side("new", new), RAN, found)
    assert (verdict, reason) == (
        Verdict.DRIFT,
        "stock megatron-core gives other log-probs: [1, 2] before, [1, 2.5] now",
    )
    near = cell("new", stock={"log-probs": (1.0, 2.0 + 1e-9)})
    assert pair_cells(old, near) == ()
    assert pair_cells(old, cell("new", stock={"log-probs": (1.0,)}))
    assert pair_cells(old, cell("new")) == ()


def _declared(name):
    """A cell that is green though its check failed, as declared for its release."""
    return cell(name, results=(CheckResult(check="a.py::t", outcome="failed", message="upstream's own"),))


def test_a_declared_failure_of_the_baseline_is_not_new_in_a_build_of_the_same():
    sides = _declared("0.18.2"), cell("candidate", failures={"a.py::t": "upstream's own"})
    (finding,) = found = pair_cells(*sides)
    assert finding.state == "same"
    assert decide(side("old", sides[0]), side("new", sides[1]), RAN, found)[0] is Verdict.OK


def test_a_declared_failure_that_the_baseline_has_not_is_told():
    """U2: a green cell of the matrix, and news for whoever uses the feature."""
    sides = cell("0.17.1"), _declared("0.18.0")
    (finding,) = found = pair_cells(*sides, upstream=frozenset({"a.py::t"}))
    assert (finding.state, finding.upstream) == ("new", True)
    assert "expectations.toml" in finding.next_step
    verdict, reason = decide(side("old", sides[0]), side("new", sides[1]), RAN, found)
    assert verdict is Verdict.DRIFT
    assert (
        reason
        == "a declared failure that the baseline does not have, broken upstream and not by us: a.py::t: upstream's own"
    )
    (back,) = pair_cells(*reversed(sides))
    assert back.state == "fixed"


def test_numbers_and_addresses_do_not_make_a_signature():
    assert signature("max error 1.5e-3 at 0x7f33 in /tmp/a/b.py\nmore") == signature("max error 2e-9 at 0x12 in /x/y")
    assert signature("KeyError: a") != signature("KeyError: b")


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], Verdict.OK),
        ([contract_finding(level="info")], Verdict.OK),
        ([contract_finding(level="drift")], Verdict.DRIFT),
        ([contract_finding()], Verdict.BREAK),
        ([contract_finding(witness="confirmed")], Verdict.BREAK),
        ([contract_finding(witness="inconclusive")], Verdict.BREAK),
        ([contract_finding(witness="refuted")], Verdict.DRIFT),
        ([contract_finding(state="fixed", witness="confirmed")], Verdict.OK),
        ([contract_finding(state="same")], Verdict.OK),
        ([contract_finding(state="new", level="unproven", witness="none")], Verdict.UNPROVEN),
    ],
)
def test_verdicts_of_findings(findings, verdict):
    assert decide(side("old", cell("old")), side("new", cell("new")), RAN, findings)[0] is verdict


@pytest.mark.parametrize("verdict", [Verdict.UNRESOLVABLE, Verdict.INFRA])
def test_a_candidate_that_cannot_be_installed_is_not_a_break(verdict):
    broken = cell("new", verdict, reason="torch>=3 conflicts with torch==2.11.0")
    found, reason = decide(side("old", cell("old")), side("new", broken), RAN, [contract_finding()])
    assert found is verdict
    assert "torch>=3" in reason


def test_without_a_baseline_or_without_cells_nothing_is_proved():
    lost = cell("old", Verdict.INFRA, reason="no disk")
    assert decide(side("old", lost), side("new", cell("new")), RAN, [])[0] is Verdict.UNPROVEN
    static = (Tier(name="static", ran=True), Tier(name="cpu", ran=False))
    assert decide(side("old"), side("new"), static, [])[0] is Verdict.UNPROVEN
    assert decide(side("old"), side("new"), static, [contract_finding()])[0] is Verdict.BREAK


def test_other_modes_than_before_are_drift():
    moved = side("new", cell("new"), modes={"gpt": "hook", "hybrid": "hook"})
    old = side("old", cell("old"), modes={"gpt": "hook", "hybrid": "legacy"})
    verdict, reason = decide(old, moved, RAN, [])
    assert verdict is Verdict.DRIFT
    assert reason.endswith("hybrid models move from legacy to hook")


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_has_a_next_step(verdict):
    words = next_step_of(verdict, side("new"), [contract_finding()])
    assert words.endswith(".")
    assert "copy" not in words


def report(findings) -> GateReport:
    return GateReport(
        run_id="r", verdict=Verdict.BREAK, reason="because", next_step="Stay.", baseline=side("0.18.2", cell("0.18.2")),
        candidate=side("fork@main"), tiers=RAN, findings=tuple(findings),
    )  # fmt: skip


def test_the_text_says_verdict_reason_next_step_and_consequences():
    words = text(report([contract_finding(), contract_finding(state="same", level="info")]))
    assert words.startswith(
        "May we move from megatron-core 0.18.2 to fork@main?\nBREAK (failed): No. Because.\nNext step: Stay.\n"
    )
    assert "hook: it fails" in words
    assert "copy:" not in words
    assert "1 more note;" in words


def test_what_several_models_have_at_one_place_is_told_once():
    """GPT, Mamba and hybrid models may share the line that a rule is about."""
    there = {"where": "hybrid_model.py:590", "witness": "confirmed"}
    findings = [contract_finding(**there), contract_finding(**there), contract_finding(where="gpt_model.py:765")]
    words = text(report(findings))
    assert words.count("hybrid_model.py:590") == words.count("gpt_model.py:765") == 1
    assert "something moved (also in 1 other model)" in words
    assert markdown(report(findings)).count("hybrid_model.py:590") == 1
    refuted = [contract_finding(**there), contract_finding(**there | {"witness": "refuted"})]
    assert text(report(refuted)).count("hybrid_model.py:590") == 2


def test_failing_checks_are_below_the_finding_that_they_name():
    found = contract_finding(message="the hook lacks `scale_logits`")
    message = "ModeError: the hook no longer hands over scale_logits"
    named = pair_cells(cell("old"), cell("new", failures={f"a.py::t{n}": message for n in range(75)}))
    other = pair_cells(cell("old"), cell("new", failures={"b.py::t": "rescale_logits_2 is wrong"}))
    folded, alone = gate_causes(report([found, *named, *other]))
    assert len(folded.checks) == 75
    assert (alone.checks, alone.in_source) == (("b.py::t",), False)
    words = text(report([found, *named, *other]))
    assert "75 failing checks name it: a.py::t0, a.py::t1, a.py::t10 and 72 more" in words
    # With two findings that name the same thing nobody can say which one it is.
    twice = contract_finding(title="other-rule", message="the call lacks `scale_logits`")
    assert [len(c.checks) for c in gate_causes(report([found, twice, *named]))] == [0, 0, 75]


def test_a_withdrawn_candidate_is_called_so():
    yanked = side("0.18.1", cell("0.18.1")).model_copy(update={"note": "yanked: broken metadata"})
    words = next_step_of(Verdict.OK, yanked, [])
    assert words == "Move to 0.18.1, but read first why it was withdrawn (yanked: broken metadata)."
    made = report([]).model_copy(update={"candidate": yanked})
    assert "0.18.1 (yanked: broken metadata, distribution" in text(made)
    assert "yanked: broken metadata" in markdown(made)


def test_a_gate_without_cells_names_the_next_step():
    words = next_step_of(Verdict.UNPROVEN, side("new"), [])
    assert words == "Run the gate without --static: only cells that ran can make it green."


def test_what_its_witness_refutes_is_not_called_a_break():
    """It counts as drift, so that is what it reads like, in every format."""
    refuted = report([contract_finding(witness="refuted")])
    assert "[drift] some-rule" in text(refuted)
    assert "**drift** some-rule" in markdown(refuted)
    assert not any(line.startswith("::error") for line in render_annotations(None, refuted))
    assert '"level": "error"' not in render_sarif(None, refuted)
    assert "[break] some-rule" in text(report([contract_finding(witness="confirmed")]))


def test_a_declared_failure_brings_its_reason_and_its_link():
    known = Finding(
        kind="as-declared", message="fails as declared: upstream", check="a.py::t", link="https://a.example"
    )
    (finding,) = pair_cells(cell("0.17.1"), _declared("0.18.0").model_copy(update={"findings": (known,)}))
    assert (finding.level, finding.link) == ("drift", "https://a.example")
    assert finding.next_step == "It is known, expectations.toml has it: fails as declared: upstream."


def test_markdown_stays_in_its_budget_and_counts_what_is_cut():
    findings = [contract_finding(message=f"{n} " + "x" * 300) for n in range(400)]
    words = markdown(report(findings), budget=20_000)
    assert len(words) < 22_000
    shown = words.count("**break** some-rule")
    assert f"_{400 - shown} causes left out here" in words
    assert GateReport.model_validate_json(report(findings).model_dump_json()) == report(findings)


def test_a_change_shows_what_changed_and_not_the_order_of_names():
    old, new = {"a": "x", "b": ["y", 1], "c": "z"}, {"c": "z", "b": ["y", 1]}
    assert contract_change(old, new) == ('- "a": "x"',)
    assert contract_change(old, dict(reversed(old.items()))) == ()
    assert contract_change(None, "called") == ('+"called"',)
    long = contract_change([], list(range(100)))
    assert len(long) == 25
    assert long[-1] == "… 79 more lines"
