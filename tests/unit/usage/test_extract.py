"""Every form in which a source can use upstream is seen, with its guards, and nothing else is."""

import pytest
from usage_builders import extracted, uses

from mcore_compat.usage.model import GuardKind, UseKind


def seen(source):
    return {(use.kind.value, use.symbol, use.line) for use in uses(source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from megatron.core.utils import unwrap_model", ("import", "megatron.core.utils.unwrap_model", 1)),
        ("from megatron.core import parallel_state as mpu\nmpu.f()", ("call", "megatron.core.parallel_state.f", 2)),
        ("import megatron.core.parallel_state as ps\nps.x", ("attribute", "megatron.core.parallel_state.x", 2)),
        ("import megatron.core\nmegatron.core.utils.f()", ("call", "megatron.core.utils.f", 2)),
        ("from megatron.core.utils import *", ("star-import", "megatron.core.utils", 1)),
        ("import importlib\nimportlib.import_module('megatron.core.x')", ("import", "megatron.core.x", 2)),
        ("from megatron.core import m\nalias = m\nalias.f()", ("call", "megatron.core.m.f", 3)),
        ("from megatron.core import m\ngetattr(m, 'f')", ("attribute", "megatron.core.m.f", 2)),
        ("from megatron.core.m import C\nC.f = lambda self: 1", ("patch", "megatron.core.m.C.f", 2)),
        ("from megatron.core.m import C\nsetattr(C, 'f', None)", ("patch", "megatron.core.m.C.f", 2)),
        ("from unittest import mock\nmock.patch('megatron.core.m.f')", ("patch", "megatron.core.m.f", 2)),
        (
            "from unittest import mock\nfrom megatron.core.m import C\nmock.patch.object(C, 'f')",
            ("patch", "megatron.core.m.C.f", 3),
        ),
        ("from megatron.core.m import C\nc = C()\nc.f = g.__get__(c)", ("patch", "megatron.core.m.C.f", 3)),
        ("from megatron.core.m import C\nclass D(C):\n  def f(self): ...", ("override", "megatron.core.m.C.f", 3)),
        ("from megatron.core.m import C\nclass D(C[int]): ...", ("subclass", "megatron.core.m.C", 2)),
        (
            "from megatron.core.m import C\nclass D(C):\n  def f(self):\n    super().f(1)",
            ("super-call", "megatron.core.m.C.f", 4),
        ),
        ("from megatron.core.m import C\nclass D(C):\n  def g(self): self.h()", ("call", "megatron.core.m.C.h", 3)),
        ("from megatron.core.m import C\ndef f(c: C): return c.x", ("field", "megatron.core.m.C.x", 2)),
        ("from megatron.core.m import C\ndef f(c: 'C | None'): c.x = 1", ("store", "megatron.core.m.C.x", 2)),
        ("TARGET = 'megatron.core.m.C'", ("string", "megatron.core.m.C", 1)),
        (
            "from functools import partial\nfrom megatron.core.m import f\npartial(f, a=1)",
            ("call", "megatron.core.m.f", 3),
        ),
        ("from megatron.core.m import C\nif 'k' in C.d: ...", ("key", "megatron.core.m.C.d", 2)),
    ],
)
def test_a_form_of_use(source, expected):
    assert expected in seen(source)


def test_names_of_the_adopter_hide_those_of_upstream():
    source = """
        from megatron.core import mpu
        def f(mpu): return mpu.gone()
        def g():
            for mpu in range(3): mpu.gone()
        h = [mpu.gone for mpu in ()]
        class C:
            mpu = 1
            def m(self): return mpu.real()
    """
    assert {use.symbol for use in uses(source) if "mpu." in use.symbol} == {"megatron.core.mpu.real"}


def test_a_rebound_name_denotes_nothing():
    source = "from megatron.core import mpu\nmpu = wrap(mpu)\nmpu.f()"
    assert [use.kind for use in uses(source)] == [UseKind.IMPORT]


def test_uses_through_the_adopters_own_module():
    files = {
        "src/acme/compat.py": "from megatron.core import parallel_state as mpu",
        "src/acme/train.py": "from acme.compat import mpu\nfrom . import compat\nmpu.f()\ncompat.mpu.g()  # megatron",
    }
    called = {use.symbol for use in uses(files) if use.kind is UseKind.CALL}
    assert called == {"megatron.core.parallel_state.f", "megatron.core.parallel_state.g"}


def test_the_adopters_own_part_of_the_namespace_is_not_upstream():
    files = {"src/megatron/bridge/a.py": "from megatron.bridge.b import x\nfrom megatron.core.u import y"}
    files["src/megatron/bridge/b.py"] = "x = 1"
    assert [use.symbol for use in uses(files)] == ["megatron.core.u.y"]


def test_alternatives_and_fallbacks_of_a_name():
    source = """
        try:
            from megatron.core.a import f
        except ImportError:
            try:
                from megatron.core.b import f
            except ImportError:
                f = None
        f(1)
    """
    [call] = [use for use in uses(source) if use.kind is UseKind.CALL]
    assert (call.symbol, call.alternatives, call.fallback) == ("megatron.core.a.f", ("megatron.core.b.f",), True)


@pytest.mark.parametrize(
    ("before", "kind", "text"),
    [
        ("try:\n  USE\nexcept ImportError: pass", GuardKind.TRY, "ImportError"),
        ("with contextlib.suppress(ImportError):\n  USE", GuardKind.TRY, "ImportError"),
        ("if TYPE_CHECKING:\n  USE", GuardKind.TYPING, ""),
        ("def f():\n  USE", GuardKind.LAZY, ""),
        ("if is_mcore_min_version('0.13'):\n  USE", GuardKind.VERSION, "0.13"),
        ("if not is_mcore_min_version('0.13'):\n  pass\nelse:\n  USE", GuardKind.VERSION, "0.13"),
        ("if Version(mcore.__version__) >= Version('0.13'):\n  USE", GuardKind.VERSION, "0.13"),
        ("NEW = Version('0.13') <= mcore_version\nif NEW:\n  USE", GuardKind.VERSION, "0.13"),
        ("def f():\n  if not mcore_min_version('0.13'):\n    return\n  USE", GuardKind.VERSION, "0.13"),
        ("if mcore_version_ok(x):\n  USE", GuardKind.UNKNOWN, "mcore_version_ok"),
        ("if False:\n  USE", GuardKind.TYPING, "never true"),
    ],
)
def test_guards(before, kind, text):
    source = before.replace("USE", "from megatron.core.m import f")
    [use] = uses(source)
    assert (kind, text) in {(guard.kind, guard.text) for guard in use.guards}


def test_guards_of_expressions():
    source = """
        from megatron.core import m
        import inspect
        if hasattr(m, "f") and m.f(): ...
        x = m.g() if hasattr(m, "g") else None
        if "a" in inspect.signature(m.h).parameters: m.h(a=1)
        y = getattr(m, "i", None)
    """
    guards = {use.symbol.rpartition(".")[2]: use.guards for use in uses(source) if use.symbol.count(".") > 2}
    assert guards["f"][0].kind is guards["g"][0].kind is guards["i"][0].kind is GuardKind.PRESENT
    assert (guards["h"][0].kind, guards["h"][0].text) == (GuardKind.SIGNATURE, "a")


def test_a_handler_knows_what_failed():
    source = "try:\n  from megatron.core.a import f\nexcept ImportError:\n  from megatron.core.b import f"
    handler = uses(source)[1].guards[0]
    assert (handler.kind, handler.symbols) == (GuardKind.HANDLER, ("megatron.core.a.f",))


def test_arguments_of_a_call():
    [call] = [u for u in uses("from megatron.core.m import f\na, b = f(1, *x, k=2, **y)") if u.arguments]
    assert call.arguments.positional == 1
    assert call.arguments.keywords == ("k",)
    assert call.arguments.open_positional
    assert call.arguments.open_keywords
    assert call.unpack == 2


def test_a_file_that_does_not_parse_is_named():
    result = extracted({"acme/bad.py": "import megatron\ndef", "acme/good.py": "import megatron.core"})
    assert [use.file for use in result.uses] == ["acme/good.py"]
    assert result.unread[0].startswith("acme/bad.py: ")
