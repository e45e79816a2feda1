"""For any edit of upstream the verdict is what running the adopter's code says."""

import importlib
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from usage_builders import found

names = st.sampled_from(["a", "b", "c", "x"])


@st.composite
def parameters(draw):
    """A parameter list: required ones, defaults, keyword-only ones, variadics."""
    chosen = draw(st.lists(names, unique=True, max_size=3))
    split = draw(st.integers(0, len(chosen)))
    places, keywords = chosen[:split], chosen[split:]
    required = draw(st.integers(0, len(places)))
    parts = [name if index < required else f"{name}=0" for index, name in enumerate(places)]
    if draw(st.booleans()) and places:
        parts.insert(required, "/") if draw(st.booleans()) and required else None
    if draw(st.booleans()):
        parts.append("*args")
    elif keywords:
        parts.append("*")
    parts += [name if draw(st.booleans()) else f"{name}=0" for name in keywords]
    if draw(st.booleans()):
        parts.append("**kwargs")
    return ", ".join(parts)


@st.composite
def edits(draw):
    """Upstream's files: where ``f`` is after an edit, and in which form."""
    signature = draw(parameters())
    body = f"def f({signature}): return 1\n"
    form = draw(
        st.sampled_from(
            [
                "same",
                "renamed",
                "moved",
                "moved-star",
                "alias",
                "wrapped",
                "if",
                "try",
                "typing",
                "class",
                "static",
                "del",
            ]
        )
    )
    method = f"self, {signature}" if signature else "self"
    home = {
        "same": body,
        "renamed": body.replace("def f", "def g"),
        "moved": "from megatron.core.n import f\n",
        "moved-star": "from .n import *\n",
        "alias": body.replace("def f", "def _f") + "f = _f\n",
        "wrapped": "import functools\ndef d(g):\n  @functools.wraps(g)\n"
        "  def w(*args, **kwargs): return g(*args, **kwargs)\n"
        "  return w\n@d\n" + body,
        "if": f"if True:\n  {body}else:\n  f = None\n",
        "try": f"try:\n  import not_installed_anywhere\nexcept ImportError:\n  {body}",
        "typing": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from megatron.core.n import f\n",
        "class": f"class f:\n  def __init__({method}): ...\n",
        "static": f"class C:\n  @staticmethod\n  {body}f = C.f\n",
        "del": body + "del f\n",
    }[form]
    return {"megatron/core/m.py": home, "megatron/core/n.py": body}


@st.composite
def calls(draw):
    places = draw(st.integers(0, 3))
    keywords = draw(st.lists(names, unique=True, max_size=2))
    return ", ".join([*map(str, range(places)), *(f"{name}=1" for name in keywords)])


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "megatron" / "core"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "megatron"}
    yield tmp_path
    _forget()
    sys.modules.update(kept)


def _forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(files=edits(), call=calls(), through=st.booleans())
def test_the_verdict_is_what_running_says(package, files, call, through):
    for path, text in files.items():
        (package / path).write_text(text)
    _forget()
    access = "from megatron.core import m\nm.f" if through else "from megatron.core.m import f\nf"
    source = f"{access}({call})\n"
    try:
        exec(compile(source, "adopter", "exec"), {})
        runs = True
    except (ImportError, AttributeError, TypeError):
        runs = False
    assert (found(source, files) == []) is runs


@settings(deadline=None)
@given(st.permutations(["a", "b", "c"]), st.integers(1, 3))
def test_an_argument_is_told_as_moved_exactly_if_another_parameter_gets_it(order, given_by_place):
    def upstream(parts):
        text = ", ".join(f"{name}=0" for name in parts)
        return f"def f({text}): return {{'a': a, 'b': b, 'c': c}}\n"

    def run(parts):
        scope: dict = {}
        exec(upstream(parts), scope)
        return scope["f"](*range(1, given_by_place + 1))

    arguments = ", ".join(str(place) for place in range(1, given_by_place + 1))
    source = f"from megatron.core.m import f\nf({arguments})\n"
    files = [{"megatron/core/m.py": upstream(parts)} for parts in (order, ["a", "b", "c"])]
    told = [rule for _, rule, _ in found(source, *files)]
    assert told == (["argument-moved"] if run(order) != run(["a", "b", "c"]) else [])
