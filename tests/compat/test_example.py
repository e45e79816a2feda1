"""The example of the guide runs in every cell, and learns."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("patch", "mode", "evidence", "library")

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy_gradient_step.py"


def test_the_guides_example(subject, capsys):
    losses = runpy.run_path(str(EXAMPLE))["main"]()
    assert losses == sorted(losses, reverse=True)
    assert "deferred_head_calls=3" in (told := capsys.readouterr().out) or "hook_calls=3" in told
