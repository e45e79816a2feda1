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

__all__ = ["Operation", "call_of", "calls", "follow_value", "keywords_of", "loop_bodies", "text", "walk_guarded"]

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


def calls(scope: ast.AST | Sequence[ast.AST]) -> Iterator[ast.Call]:
    """All calls inside, in source order."""
    nodes = [scope] if isinstance(scope, ast.AST) else list(scope)
    found = [node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Call)]
    yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))


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
        if isinstance(statement, ast.If):
            test = text(statement.test)
            yield from walk_guarded(statement.body, (*guards, test))
            yield from walk_guarded(statement.orelse, (*guards, f"not ({test})"))
        elif isinstance(statement, ast.For | ast.While):
            yield from walk_guarded(statement.body, guards)
            yield from walk_guarded(statement.orelse, guards)
        elif isinstance(statement, ast.With):
            yield from walk_guarded(statement.body, guards)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, statement.orelse, statement.finalbody, *(h.body for h in statement.handlers)):
                yield from walk_guarded(part, guards)


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
    names = _Names(values={parameter: ()} if parameter else {})
    operations: list[Operation] = []

    def note(node: ast.AST, guards: tuple[str, ...], prefix: str = "") -> None:
        shown = prefix + names.canonical(node)
        condition = f"if {' and '.join(guards)}: " if guards else ""
        inner = node.value if isinstance(node, ast.Return | ast.Expr) else node
        callee = text(inner.func) if isinstance(inner, ast.Call) else None
        operations.append(Operation(condition + shown, callee, getattr(node, "lineno", 0)))

    for statement, guards in walk_guarded(body):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            bound = [name for target in targets for name in _target_names(target)]
            value = statement.value
            if start is not None and start(value):
                names.values.update(dict.fromkeys(bound[:1], guards))
            elif not names.uses(value):
                used_as_target = [t for t in targets if names.uses(t)]  # e.g. ``logits[:, 0] = …`` keeps the value
                for target in used_as_target:
                    note(target, guards, prefix="store ")
                names.forget(bound, guards)
            elif isinstance(value, ast.Name):
                kind = names.values if value.id in names.values else names.containers
                kind.update(dict.fromkeys(bound, guards))
            elif _is_container(value, names):
                names.containers.update(dict.fromkeys(bound, guards))
            else:
                ended = any(end(call) and names.uses(call) for call in calls(value))
                note(value, guards, prefix="" if ended else f"{VALUE} = ")
                if ended:
                    names.forget(bound, guards)
                elif len(bound) == 1:  # several results of an unknown call: that call is the finding, not its results
                    names.values[bound[0]] = guards
        elif isinstance(statement, ast.AugAssign):
            held = isinstance(statement.target, ast.Name) and statement.target.id in names.values
            if held or names.uses(statement.value):
                note(statement, guards)
        elif isinstance(statement, ast.Return) and start is not None and statement.value and start(statement.value):
            operations.append(Operation(f"return {VALUE}", None, statement.lineno))
        else:
            for head in _heads(statement):
                if names.uses(head):
                    prefix = "" if head is statement else f"{type(statement).__name__.lower()} "
                    note(head, guards, prefix)
    return operations
