"""What a test says about the code behind it: versions, ``hasattr``, ``TYPE_CHECKING``; and judging it for a release."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence

from packaging.version import InvalidVersion, Version

from mcore_compat.usage.model import Guard, GuardKind

__all__ = ["Tested", "guards_of_test", "leaves_block", "version_holds"]

# Both outcomes of a test: the guards of what runs if it is true, and of what runs if it is false.
Tested = tuple[tuple[Guard, ...], tuple[Guard, ...]]

_NOTHING: Tested = ((), ())
_VERSION_NAME = re.compile(
    r"(?i)(mcore|megatron)\w*version|version\w*(mcore|megatron)|(mcore|megatron)\w*_(ge|min|lt)\b"
)
_MEGATRON = re.compile(r"(?i)mcore|megatron")
_BELOW = re.compile(r"(?i)(^|_)(lt|below|before|max|older|less)(_|$)")
_VERSION_TEXT = re.compile(r"\d+(\.\d+)+[\w.+-]*")
_OPERATORS = {ast.GtE: ">=", ast.Gt: ">", ast.LtE: "<=", ast.Lt: "<", ast.Eq: "==", ast.NotEq: "!="}
_COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_NEGATED = {">=": "<", ">": "<=", "<=": ">", "<": ">=", "==": "!=", "!=": "=="}
_MIRRORED = {">=": "<=", ">": "<", "<=": ">=", "<": ">", "==": "==", "!=": "!="}


def version_holds(guard: Guard, version: str | None) -> bool | None:
    """Whether a version guard lets its code run with this Megatron; None: that cannot be known."""
    if version is None or guard.kind is not GuardKind.VERSION:
        return None
    try:
        return _COMPARE[guard.operator](Version(version), Version(guard.text))
    except InvalidVersion:
        return None


def leaves_block(body: Sequence[ast.stmt]) -> bool:
    """Whether what follows the block is not reached after it."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def guards_of_test(
    test: ast.expr, symbol_of: Callable[[ast.expr], str | None], assigned: Callable[[str], ast.expr | None]
) -> Tested:
    """Guards of both outcomes.

    Args:
        test: the condition.
        symbol_of: upstream symbol that an expression denotes, or None.
        assigned: what a name was assigned, where it was assigned once; None otherwise.
    """

    def again(inner: ast.expr) -> Tested:
        return guards_of_test(inner, symbol_of, assigned)

    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yes, no = again(test.operand)
        return no, yes
    if isinstance(test, ast.BoolOp):
        parts = [again(value) for value in test.values]
        if isinstance(test.op, ast.And):
            return tuple(guard for yes, _ in parts for guard in yes), ()
        return (), tuple(guard for _, no in parts for guard in no)
    if isinstance(test, ast.Constant):
        never = (Guard(GuardKind.TYPING, text="never true"),)
        return ((), never) if test.value else (never, ())
    if isinstance(test, ast.Name | ast.Attribute):
        return _of_name(test, again, assigned)
    if isinstance(test, ast.Call):
        return _of_call(test, symbol_of)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_compare(test, symbol_of)
    return _NOTHING


def _of_name(
    test: ast.Name | ast.Attribute, again: Callable[[ast.expr], Tested], assigned: Callable[[str], ast.expr | None]
) -> Tested:
    name = test.id if isinstance(test, ast.Name) else test.attr
    if name == "TYPE_CHECKING":
        return (Guard(GuardKind.TYPING),), ()
    value = assigned(name) if isinstance(test, ast.Name) else None
    if value is not None and not isinstance(value, ast.Constant | ast.Name):
        return again(value)
    return _NOTHING


def _of_call(test: ast.Call, symbol_of: Callable[[ast.expr], str | None]) -> Tested:
    called = test.func.id if isinstance(test.func, ast.Name) else getattr(test.func, "attr", "")
    if called in {"hasattr", "getattr"} and len(test.args) >= 2:
        name = test.args[1]
        owner = symbol_of(test.args[0])
        if owner and isinstance(name, ast.Constant) and isinstance(name.value, str):
            symbols = (f"{owner}.{name.value}",)
            return (Guard(GuardKind.PRESENT, symbols),), (Guard(GuardKind.ABSENT, symbols),)
        return _NOTHING
    if _VERSION_NAME.search(called):
        texts = [a.value for a in test.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if not texts or not _VERSION_TEXT.fullmatch(texts[0]):
            unknown = (Guard(GuardKind.UNKNOWN, text=called),)
            return unknown, unknown
        return _version("<" if _BELOW.search(called) else ">=", texts[0])
    return _NOTHING


def _of_compare(test: ast.Compare, symbol_of: Callable[[ast.expr], str | None]) -> Tested:
    left, right, op = test.left, test.comparators[0], test.ops[0]
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(left, ast.Constant):
            return _NOTHING
        inside = _inspected(right, symbol_of)
        kind = GuardKind.SIGNATURE if inside else GuardKind.KEY
        inside = inside or symbol_of(right)
        if not inside:
            return _NOTHING
        yes = (Guard(kind, (inside,), text=str(left.value)),)
        return (yes, ()) if isinstance(op, ast.In) else ((), yes)
    sign = _OPERATORS.get(type(op))
    if sign is None:
        return _NOTHING
    for subject, bound, mirrored in ((left, right, False), (right, left, True)):
        text = _constant_version(bound)
        if text and _MEGATRON.search(ast.unparse(subject)) and "ersion" in ast.unparse(test):
            return _version(_MIRRORED[sign] if mirrored else sign, text)
    return _NOTHING


def _version(sign: str, text: str) -> Tested:
    return (
        (Guard(GuardKind.VERSION, operator=sign, text=text),),
        (Guard(GuardKind.VERSION, operator=_NEGATED[sign], text=text),),
    )


def _constant_version(node: ast.expr) -> str | None:
    """The version that an expression such as ``"0.13"``, ``Version("0.13")`` or ``(0, 13)`` spells."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _constant_version(node.args[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VERSION_TEXT.fullmatch(node.value):
        return node.value
    if isinstance(node, ast.Tuple) and node.elts and all(isinstance(e, ast.Constant) for e in node.elts):
        return ".".join(str(e.value) for e in node.elts if isinstance(e, ast.Constant))
    return None


def _inspected(node: ast.expr, symbol_of: Callable[[ast.expr], str | None]) -> str | None:
    """The symbol whose parameters an expression such as ``inspect.signature(f).parameters`` lists."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and inner.args:
            called = getattr(inner.func, "attr", None) or getattr(inner.func, "id", "")
            if called in {"signature", "getfullargspec"}:
                target = inner.args[0]
                if isinstance(target, ast.Attribute) and target.attr == "__init__":
                    target = target.value
                return symbol_of(target)
    return None
