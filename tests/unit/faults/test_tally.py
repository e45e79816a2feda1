"""The closing table of the faults session: nothing that was not caught, planted or asked for may go unsaid."""

import json
from dataclasses import replace

import catalogue
import pytest
import run
from catalogue import Fault
from places import Outcome
from tally import Tally

FIRST, SECOND = (
    Fault(name, "What.", "hazard: x", "unit", "f.py", (("a", "b"),), ("unit/t.py::test_a",), kind=kind)
    for name, kind in (("first", "kernel"), ("second", "runs"))
)
CONTROL = replace(FIRST, id="(nothing planted)", replace=(), kind="")


def told(*outcomes, chosen=(FIRST, SECOND), outdated=()):
    tally = Tally((FIRST, SECOND), chosen, dict(outdated))
    for outcome in outcomes:
        tally.add(outcome)
    return tally


def test_green_means_that_each_was_caught_and_the_controls_pass():
    both = [Outcome(FIRST, True, "t", 1.5), Outcome(SECOND, True, "t", 2.0)]
    assert told(*both, Outcome(CONTROL, True, "3 cases", 1.0)).green
    assert not told(*both, Outcome(CONTROL, False, "t", 1.0)).green
    assert not told(both[0]).green  # no outcome is not "caught"
    assert not told(both[0], Outcome(SECOND, False, "passed", 1.0)).green
    assert not told(*both[:1], outdated={"second": "the text is gone"}.items()).green


def test_the_table_names_what_is_wrong_and_counts_what_was_left_out():
    tally = told(
        Outcome(FIRST, False, "all passed", 1.5),
        Outcome(CONTROL, False, "test_b", 1.0),
        chosen=(FIRST,),
        outdated={"first": "stands 0 times"}.items(),
    )
    text = tally.text()
    for part in ("NOT CAUGHT: first: all passed", "CONTROL FAILS: unit: test_b", "NOT PLANTED: stands 0 times"):
        assert part in text
    assert "0 of 1 faults caught, 1 more were not asked for" in text
    counts = json.loads(tally.as_json())
    assert (counts["planted"], counts["caught"], counts["left_out"]) == (1, 0, 1)
    assert counts["failing_controls"] == ["unit: test_b"]
    assert counts["kinds"]["kernel"] == {"planted": 1, "caught": 0, "left_out": 0, "seconds": 1.5}
    assert counts["kinds"]["runs"]["left_out"] == 1


def test_every_check_that_a_fault_names_runs_without_it_too():
    """A control that leaves a check out would let one that always fails catch everything."""
    for place in catalogue.PLACES:
        faults = [fault for fault in catalogue.load() if fault.place == place and place != "run"]
        named = {(check, tuple(fault.env.items())) for fault in faults for check in fault.caught_by}
        made = run.controls(place, faults)
        assert {(check, tuple(control.env.items())) for control in made for check in control.caught_by} == named
        assert not any(control.replace for control in made)


@pytest.mark.parametrize("place", catalogue.PLACES)
def test_every_place_has_its_turn(place):
    assert place in run.ORDER
