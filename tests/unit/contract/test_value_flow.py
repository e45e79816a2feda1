"""The follower sees every operation on the head's result, whatever it is called and wherever it is put."""

from __future__ import annotations

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_compat.contract.extract.value_flow import follow_value, text

# statement with {v} for the name that holds the value and {n} for the next name; what is seen of it
STEPS = {
    "{n} = self.scale({v})": "@ = self.scale(@)",
    "{v} = {v} * 2": "@ = @ * 2",
    "{v} *= 2": "@ *= 2",
    "{n} = {v}": None,
    "other = unrelated(1)": None,
    "print({v}.shape)": "print(@.shape)",
    "{v}[0] = 1": "store @[0]",
    "box = {{'logits': {v}}}; log(box)": "log({{@}})",
    "a, b = split({v})": "@ = split(@)",
    "with torch.no_grad():\n    m = {v}.argmax(-1)": "@ = @.argmax(-1)",
    "if flag:\n    {v} = clamp({v})": "if flag: @ = clamp(@)",
    "try:\n    {v} = clamp({v})\nexcept E:\n    pass": "@ = clamp(@)",
    "for i in range(2):\n    {v} = {v} + i": "@ = @ + i",
    "assert {v} is not None": "assert @ is not None",
}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=6))
def test_every_operation_is_written_down(steps):
    lines, expected, name = ["v0, _ = head(x)"], [], "v0"
    for number, step in enumerate(steps, start=1):
        following = f"v{number}"
        lines.append(step.format(v=name, n=following))
        if STEPS[step]:
            expected.append(STEPS[step].replace("{{", "{").replace("}}", "}"))
        if step.startswith("{n} ="):
            name = following
    lines.append(f"loss = ask(labels, {name})\nreturn loss")
    body = ast.parse("def f():\n" + "\n".join(f"    {row}" for line in lines for row in line.split("\n"))).body[0].body
    seen = follow_value(body, start=lambda v: text(v) == "head(x)", end=lambda call: text(call.func) == "ask")
    assert [operation.text for operation in seen] == [*expected, "ask(labels, @)"]


def test_a_name_bound_to_something_else_is_let_go_only_where_that_is_sure():
    source = "v, _ = head(x)\nif flag:\n    v = None\nuse(v)\nv = None\nuse(v)\n"
    seen = follow_value(ast.parse(source).body, start=lambda v: text(v) == "head(x)")
    assert [operation.text for operation in seen] == ["use(@)"]
