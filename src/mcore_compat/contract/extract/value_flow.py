"""What one function does with the output layer's result, read from its syntax tree.

The value is followed from the call that makes it, in source order, through assignments and containers. Every
operation is written down as canonical text in which the value is ``@``; conditions around it are kept. Nothing is
guessed: what the follower does not understand is still written down, and judged unknown.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Operation",
    "call_of",
    "calls",
    "follow_value",
    "keywords_of",
    "loop_bodies",
    "text",
    "walk_guarded",
    "walk_in_order",
]

VALUE = "@"


@dataclass(frozen=True)
class Operation:
    """One use of the followed value.

    Attributes:
        text: canonical text, ``if <condition>: `` in front where it stands under one.
        callee: dotted text of the called function where the whole operation is a call that takes the value.
        line: in the file.
    """

    text: str
    callee: str | None
    line: int


def text(node: ast.AST) -> str:
    """One-line source of a node."""
    return " ".join(ast.unparse(node).split())


def walk_in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all inside it, in source order; unlike line numbers this also holds for inlined code."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        waiting.extend(reversed(list(ast.iter_child_nodes(current))))


def calls(scope: ast.AST | Sequence[ast.AST]) -> Iterator[ast.Call]:
    """All calls inside, in source order."""
    for top in [scope] if isinstance(scope, ast.AST) else scope:
        yield from (node for node in walk_in_order(top) if isinstance(node, ast.Call))


def call_of(scope: ast.AST | Sequence[ast.AST], *callees: str) -> ast.Call | None:
    """First call of one of these (dotted texts) inside."""
    return next((call for call in calls(scope) if text(call.func) in callees), None)


def keywords_of(call: ast.Call, body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Keyword arguments of a call; ``**name`` is looked up where the function makes that dictionary in one go."""
    found: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is not None:
            found[keyword.arg] = keyword.value
            continue
        made = _literal_dict(text(keyword.value), body)
        found.update(made if made is not None else {"**": keyword.value})
    return found


def _literal_dict(name: str, body: Sequence[ast.stmt]) -> dict[str, ast.expr] | None:
    for statement, _ in walk_guarded(body):
        if not isinstance(statement, ast.Assign) or [text(target) for target in statement.targets] != [name]:
            continue
        value = statement.value
        if isinstance(value, ast.Call) and text(value.func) == "dict" and not value.args:
            return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
        if isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            return {str(k.value): v for k, v in pairs if isinstance(k, ast.Constant)}
    return None


def loop_bodies(scope: ast.AST) -> list[ast.For | ast.While]:
    """The loops inside a function."""
    return [node for node in ast.walk(scope) if isinstance(node, ast.For | ast.While)]


def walk_guarded(body: Sequence[ast.stmt], guards: tuple[str, ...] = ()) -> Iterator[tuple[ast.stmt, tuple[str, ...]]]:
    """Simple statements and compound heads in source order, each with the conditions it stands under."""
    for statement in body:
        yield statement, guards
        for inner, condition in _branches(statement):
            yield from walk_guarded(inner, guards if condition is None else (*guards, condition))


def _branches(statement: ast.stmt) -> list[tuple[list[ast.stmt], str | None]]:
    """The bodies of a compound statement in source order, each with its condition."""
    if isinstance(statement, ast.If):
        test = text(statement.test)
        return [(statement.body, test), (statement.orelse, f"not ({test})")]
    if isinstance(statement, ast.For | ast.While):
        return [(statement.body, None), (statement.orelse, None)]
    if isinstance(statement, ast.With):
        return [(statement.body, None)]
    if isinstance(statement, ast.Try):
        handlers = [handler.body for handler in statement.handlers]
        return [(part, None) for part in (statement.body, statement.orelse, statement.finalbody, *handlers)]
    return []


@dataclass
class _Names:
    """Names that hold the value now, and containers that hold it inside; each with its binding's conditions."""

    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    containers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def forget(self, bound: Sequence[str], guards: tuple[str, ...]) -> None:
        """Names are bound to something else. Under narrower or other conditions the old binding may still be seen."""
        for table in (self.values, self.containers):
            for name in bound:
                if name in table and table[name][: len(guards)] == guards:
                    del table[name]

    def uses(self, node: ast.AST) -> bool:
        names = self.values.keys() | self.containers.keys()
        return any(isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load) for n in ast.walk(node))

    def canonical(self, node: ast.AST) -> str:
        class Rename(ast.NodeTransformer):
            def visit_Name(_self, name: ast.Name) -> ast.AST:  # noqa: N805 - the base class's names
                if name.id in self.values:
                    return ast.Name(VALUE, name.ctx)
                return ast.Name("{@}", name.ctx) if name.id in self.containers else name

        return text(Rename().visit(copy.deepcopy(node)))


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """The expressions a statement evaluates itself, without the bodies that are walked on their own."""
    if isinstance(statement, ast.If | ast.While):
        return [statement.test]
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.With):
        return [item.context_expr for item in statement.items]
    if isinstance(statement, ast.Try | ast.FunctionDef | ast.ClassDef):
        return []
    return [statement]


def _is_container(node: ast.AST, names: _Names) -> bool:
    """Whether an expression only puts the value into a dict, list or tuple."""
    if isinstance(node, ast.Call) and text(node.func) in {"OrderedDict", "dict"} and node.args:
        node = node.args[0]
    parts: list[ast.expr | None]
    if isinstance(node, ast.Dict):
        parts = list(node.values)
    elif isinstance(node, ast.List | ast.Tuple):
        parts = list(node.elts)
    else:
        return False
    return all(p is None or not names.uses(p) or (isinstance(p, ast.Name) and p.id in names.values) for p in parts)


def _target_names(target: ast.AST) -> list[str]:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Tuple | ast.List):
        return [name for element in target.elts for name in _target_names(element)]
    return []


def follow_value(
    body: Sequence[ast.stmt],
    *,
    start: Callable[[ast.expr], bool] | None = None,
    parameter: str | None = None,
    end: Callable[[ast.Call], bool] = lambda _: False,
) -> list[Operation]:
    """Follow a value through a function's statements.

    Args:
        body: the statements.
        start: which expression makes the value; the first name of its assignment's target then holds it.
        parameter: or the name that holds the value from the beginning.
        end: which call takes the value and makes something else of it; its result is not followed.
    """
    follower = _Follower(start, _Names(values={parameter: ()} if parameter else {}), end)
    for statement, guards in walk_guarded(body):
        follower.visit(statement, guards)
    return follower.operations


class _Follower:
    """One visit per statement, in source order."""

    def __init__(
        self, start: Callable[[ast.expr], bool] | None, names: _Names, end: Callable[[ast.Call], bool]
    ) -> None:
        self.start = start
        self.names = names
        self.end = end
        self.operations: list[Operation] = []

    def visit(self, statement: ast.stmt, guards: tuple[str, ...]) -> None:
        if isinstance(statement, ast.Assign) or (isinstance(statement, ast.AnnAssign) and statement.value is not None):
            self._assignment(statement, guards)
        elif isinstance(statement, ast.AugAssign):
            held = isinstance(statement.target, ast.Name) and statement.target.id in self.names.values
            if held or self.names.uses(statement.value):
                self._note(statement, guards)
        elif isinstance(statement, ast.Return) and statement.value is not None and self._starts(statement.value):
            self.operations.append(Operation(f"return {VALUE}", None, statement.lineno))
        else:
            for head in _heads(statement):
                if self.names.uses(head):
                    prefix = "" if head is statement else f"{type(statement).__name__.lower()} "
                    self._note(head, guards, prefix)

    def _starts(self, value: ast.expr) -> bool:
        return self.start is not None and self.start(value)

    def _assignment(self, statement: ast.Assign | ast.AnnAssign, guards: tuple[str, ...]) -> None:
        value = statement.value
        assert value is not None
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        bound = [name for target in targets for name in _target_names(target)]
        names = self.names
        if self._starts(value):
            names.values.update(dict.fromkeys(bound[:1], guards))
        elif not names.uses(value):
            for target in targets:  # ``logits[:, 0] = …`` keeps the value
                if names.uses(target):
                    self._note(target, guards, prefix="store ")
            names.forget(bound, guards)
        elif isinstance(value, ast.Name):
            kind = names.values if value.id in names.values else names.containers
            kind.update(dict.fromkeys(bound, guards))
        elif _is_container(value, names):
            names.containers.update(dict.fromkeys(bound, guards))
        else:
            self._computed(value, bound, guards)

    def _computed(self, value: ast.expr, bound: list[str], guards: tuple[str, ...]) -> None:
        """An expression that makes something of the value."""
        ended = any(self.end(call) and self.names.uses(call) for call in calls(value))
        self._note(value, guards, prefix="" if ended else f"{VALUE} = ")
        if ended:
            self.names.forget(bound, guards)
        elif len(bound) == 1:  # several results of an unknown call: that call is the finding, not its results
            self.names.values[bound[0]] = guards

    def _note(self, node: ast.AST, guards: tuple[str, ...], prefix: str = "") -> None:
        shown = prefix + self.names.canonical(node)
        condition = f"if {' and '.join(guards)}: " if guards else ""
        inner = node.value if isinstance(node, ast.Return | ast.Expr) else node
        callee = text(inner.func) if isinstance(inner, ast.Call) else None
        self.operations.append(Operation(condition + shown, callee, getattr(node, "lineno", 0)))
