"""What an upstream change does to a use: which severity, on which line, and when nothing is said."""

import pytest
from usage_builders import findings, found

M = "megatron/core/m.py"
HAS = {M: "def f(a, b=1): return a\nclass C:\n    limit = 1\n    def go(self, x): return x\n"}
LACKS = {M: "other = 1\n"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from megatron.core.m import f", [("fails at import", "missing-import", 1)]),
        ("from megatron.core.gone import f", [("fails at import", "missing-import", 1)]),
        ("def t():\n  from megatron.core.m import f\n  f(1)", [("fails when called", "missing-import", 2)]),
        ("from megatron.core import m\nm.f(1)", [("fails at import", "missing-attribute", 2)]),
        ("from megatron.core import m\ndef t(): m.f(1)", [("fails when called", "missing-attribute", 2)]),
        ("from megatron.core import m\nclass D(m.C): ...", [("fails at import", "missing-attribute", 2)]),
        ("try:\n  from megatron.core.m import f\nexcept ImportError:\n  f = None\nif f: f(1)", []),
        (
            "try:\n  from megatron.core.m import f\nexcept ModuleNotFoundError:\n  f = None",
            [("fails at import", "missing-import", 2)],
        ),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from megatron.core.m import f", []),
        ("from megatron.core import m\nif hasattr(m, 'f'): m.f()", []),
        ("from megatron.core import m\ng = getattr(m, 'f', None)", []),
        ("from megatron.core import m\nm.f = lambda: 1", []),
        ("from megatron.training.x import y", []),
        ("from megatron.core.m import other\nother.anything()", []),
    ],
)
def test_a_symbol_that_does_not_exist(source, expected):
    assert found(source, LACKS) == expected


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("try:\n  from megatron.core.m import f\nexcept ImportError:\n  f = None", "hidden-import"),
        ("from megatron.core import m\nif hasattr(m, 'f'): m.f(1)", "hidden-attribute"),
        ("from megatron.core import m\ng = getattr(m, 'f', None)", "hidden-attribute"),
        ("from megatron.core import m\nm.f = lambda a: 1", "dead-patch"),
    ],
)
def test_what_a_guard_hides_is_told_only_against_a_reference_that_had_it(source, rule):
    assert ("silent", rule) in {finding[:2] for finding in found(source, LACKS, HAS)}
    assert found(source, LACKS) == []
    assert found(source, HAS, HAS) == []


def test_a_shim_with_two_places_is_fine():
    source = """
        try:
            from megatron.core.m import f
        except ImportError:
            from megatron.core.n import f
        f(1)
    """
    assert found(source, {M: "", "megatron/core/n.py": "def f(a): ..."}, HAS) == []
    assert found(source, HAS) == []
    assert found(source, LACKS)[0][:2] == ("fails at import", "missing-import")


@pytest.mark.parametrize(("version", "count"), [("12", 0), ("13", 1)])
def test_a_version_test_is_evaluated_for_the_megatron_at_hand(version, count):
    info = {"megatron/core/package_info.py": f"MAJOR = 0\nMINOR = {version}\nPATCH = 0\n"}
    source = "if is_mcore_min_version('0.13.0'):\n  from megatron.core.m import f"
    assert len(found(source, LACKS | info)) == count


@pytest.mark.parametrize(
    ("definition", "call", "fits"),
    [
        ("def f(a): ...", "m.f(1, k=2)", False),
        ("def f(a): ...", "m.f(1, 2)", False),
        ("def f(a, b): ...", "m.f(1)", False),
        ("def f(a, *, b): ...", "m.f(1, 2)", False),
        ("def f(a, /): ...", "m.f(a=1)", False),
        ("def f(a, /, **k): ...", "m.f(a=1)", False),
        ("def f(a): ...", "m.f(1, a=2)", False),
        ("def f(a, **k): ...", "m.f(1, k=2)", True),
        ("def f(*a): ...", "m.f(1, 2, 3)", True),
        ("def f(a, b): ...", "m.f(*x)", True),
        ("def f(a, b): ...", "m.f(**x)", True),
        ("@unknown\ndef f(a): ...", "m.f(1, 2)", True),
        ("f = make()", "m.f(1, 2)", True),
        ("class f:\n  def __init__(self, a): ...", "m.f(1, 2)", False),
        ("class f:\n  def __init__(self, a): ...", "m.f(1)", True),
        ("import dataclasses\n@dataclasses.dataclass\nclass f:\n  a: int\n  b: int = 1", "m.f(a=1, c=2)", False),
        ("import dataclasses\n@dataclasses.dataclass\nclass f:\n  a: int\n  b: int = 1", "m.f(b=1)", False),
        ("import dataclasses\n@dataclasses.dataclass\nclass f:\n  a: int\n  b: int = 1", "m.f(1, 2)", True),
        ("class f:\n  @staticmethod\n  def s(a): ...", "m.f.s(1)", True),
        ("class f:\n  @classmethod\n  def s(cls, a): ...", "m.f.s(1, 2)", False),
        ("class f:\n  def s(self, a): ...", "m.f.s(1)", False),
        ("class K:\n  def s(self, a): ...\nf = K()", "m.f.s(1)", True),
        ("if X:\n  def f(a): ...\nelse:\n  def f(a, b): ...", "m.f(1)", True),
        ("from torch import nn\nclass f(nn.Unknown): ...", "m.f(1, 2)", True),
    ],
)
def test_whether_a_call_fits(definition, call, fits):
    result = found(f"from megatron.core import m\ndef t(): {call}", {M: definition})
    assert result == ([] if fits else [("fails when called", "call-does-not-fit", 2)])


@pytest.mark.parametrize(
    ("old", "new", "source", "severity", "rule"),
    [
        ("def f(a, b): return a + b", "def f(b, a): return a + b", "m.f(1, 2)", "argument moved", "argument-moved"),
        ("def f(a): return a", "def f(a): return 1", "m.f(a=1)", "silent", "argument-ignored"),
        ("def f(): return 1, 2", "def f(): return 1, 2, 3", "x, y = m.f()", "fails when called", "result-length"),
        ("d = {}\nd['k'] = 1", "d = {}\nd['l'] = 1", "'k' in m.d", "silent", "missing-key"),
        ("d = {}\nd['k'] = 1", "d = {}\nd['l'] = 1", "m.d['k']", "fails when called", "missing-key"),
    ],
)
def test_what_only_a_comparison_shows(old, new, source, severity, rule):
    code = f"from megatron.core import m\ndef t(): {source}"
    assert found(code, {M: new}, {M: old}) == [(severity, rule, 2)]
    assert found(code, {M: new}, {M: new}) == []
    assert found(code, {M: new}) == []


OLD = {M: "class C:\n  def go(self, x): ...\n  def run(self):\n    return self.go(x=1)\n"}
NEW = {M: "class C:\n  def go(self, x, y=None): ...\n  def run(self):\n    return self.go(x=1, y=2)\n"}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("from megatron.core.m import C\nclass D(C):\n  def go(self, x): ...", "override-misfit"),
        ("from megatron.core.m import C\ndef go(self, x): ...\nC.go = go", "patch-misfit"),
        ("from megatron.core.m import C\nC.go = lambda self, x: 1", "patch-misfit"),
        ("from megatron.core.m import C\ndef t(c: C):\n  c.go = go.__get__(c)\ndef go(self, x): ...", "patch-misfit"),
    ],
)
def test_a_replacement_that_upstream_calls_with_more(source, rule):
    assert [finding[:2] for finding in found(source, NEW, OLD)] == [("no longer fits its callers", rule)]
    assert found(source, OLD, OLD) == []
    assert found(source.replace("self, x", "self, x, **kwargs"), NEW, OLD) == []


def test_an_override_of_a_method_that_is_gone():
    source = "from megatron.core.m import C\nclass D(C):\n  def go(self, x): ...\n  def mine(self): ..."
    assert found(source, {M: "class C: ..."}, OLD) == [("silent", "dead-override", 3)]


@pytest.mark.parametrize(
    "upstream",
    [
        {M: "from megatron.core.n import f", "megatron/core/n.py": "def f(a): ..."},
        {M: "from .n import *", "megatron/core/n.py": "def f(a): ..."},
        {M: "from . import n\nf = n.f", "megatron/core/n.py": "def f(a): ..."},
        {M: "def _f(a): ...\nf = _f"},
        {M: "if True:\n  def f(a): ..."},
        {M: "try:\n  import te\nexcept ImportError:\n  f = None\nelse:\n  def f(a): ..."},
        {M: "def __getattr__(name): ..."},
        {"megatron/core/m/__init__.py": "from .f import f", "megatron/core/m/f.py": "def f(a): ..."},
    ],
)
def test_the_ways_in_which_a_name_can_be_there(upstream):
    assert found("from megatron.core.m import f\ndef t(): f(1)", upstream) == []


@pytest.mark.parametrize(
    "upstream",
    [
        {M: "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from x import f"},
        {M: "def f(): ...\ndel f"},
        {M: "from .n import *", "megatron/core/n.py": "__all__ = ['g']\ndef f(): ..."},
        {M: "if False:\n  f = 1"},
    ],
)
def test_the_ways_in_which_a_name_only_seems_to_be_there(upstream):
    assert found("from megatron.core.m import f", upstream) == [("fails at import", "missing-import", 1)]


def test_a_missing_import_is_told_once_and_not_at_each_use():
    source = "from megatron.core import gone\ngone.a()\ngone.b()"
    assert found(source, LACKS) == [("fails at import", "missing-import", 1)]


def test_members_come_from_bases_and_from_assignments():
    upstream = {
        M: """
            import torch
            class B(torch.nn.Module):
                def __init__(self):
                    self.built = 1
                    self.register_buffer("buffer", None)
            class C(B):
                pass
        """
    }
    source = "from megatron.core.m import C\nC.built\nC.buffer\nC.state_dict\nC.__name__\nC.gone"
    assert [finding.symbol for finding in findings(source, upstream)] == ["megatron.core.m.C.gone"]


def test_an_override_that_its_own_class_calls_is_not_dead():
    old = {"megatron/core/m.py": "class C:\n  def run(self): self.go()\n  def go(self): ...\n"}
    new = {"megatron/core/m.py": "class C:\n  def run(self): ...\n"}
    head = "from megatron.core.m import C\nclass D(C):\n  def go(self): ...\n"
    assert found(head, new, old) == [("silent", "dead-override", 3)]
    assert found(f"{head}  def run(self): self.go()\n", new, old) == []


def test_what_is_behind_a_test_for_a_lost_key_is_told_once():
    old = {"megatron/core/m.py": "class H:\n  tracker = {}\n  def go():\n    H.tracker['a'] = 1\n  def clean(): ...\n"}
    new = {"megatron/core/m.py": "class H:\n  tracker = {}\n  def go():\n    H.tracker['b'] = 1\n"}
    source = "from megatron.core.m import H\ndef f():\n  t = H.tracker\n  if 'a' in t:\n    t['a']\n    H.clean()\n"
    assert found(source, new, old) == [("silent", "missing-key", 4)]
    unguarded = source.replace("if 'a' in t", "if t")
    assert [line for _, _, line in found(unguarded, new, old)] == [5, 6]
