"""The example and the code blocks of the guides run in every cell; the example learns."""

import runpy
from pathlib import Path

import pytest
import torch
from support.models import DEVICE, Shape, build
from support.snippets import python_snippets

pytestmark = pytest.mark.needs("patch", "mode", "evidence", "library")

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy_gradient_step.py"
SNIPPETS = [snippet for snippet in python_snippets() if snippet.world == "gpt"]


def test_the_guides_example(subject, capsys):
    losses = runpy.run_path(str(EXAMPLE))["main"]()
    assert losses == sorted(losses, reverse=True)
    assert "deferred_head_calls=3" in (told := capsys.readouterr().out) or "hook_calls=3" in told


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.id)
def test_the_guides_code_blocks(snippet):
    rows, width = 2, 6
    ids = torch.randint(0, 97, (rows, width), device=DEVICE)
    names = {
        "model": build(Shape(packed=True, dtype=torch.float32)),
        "input_ids": ids,
        "position_ids": torch.arange(width, device=DEVICE).expand(rows, width),
        "attention_mask": torch.tril(torch.ones(1, 1, width, width, device=DEVICE)) < 0.5,
        "labels": ids.roll(-1, 1),
        "advantages": torch.randn(rows, width, device=DEVICE),
        "packed": None,
        "real_tokens": torch.ones_like(ids, dtype=torch.bool),
        "counted": torch.ones_like(ids, dtype=torch.bool),
        "jagged_ids": torch.nested.nested_tensor([ids[0, :4], ids[1]], layout=torch.jagged),
    }
    exec(snippet.compiled(), names)
    assert [name for name in names if name in {"output", "result"}]
