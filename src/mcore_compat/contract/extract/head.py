"""Contract items of one model class: its forward, the hook's call site, and the way from head to loss."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mcore_compat.contract.extract.inlining import ORIGIN, Inliner, bound_name
from mcore_compat.contract.extract.modules import ClassRef, FunctionRef, ModuleIndex
from mcore_compat.contract.extract.value_flow import (
    Operation,
    call_of,
    calls,
    follow_value,
    keywords_of,
    loop_bodies,
    text,
    walk_guarded,
    walk_in_order,
)
from mcore_compat.contract.model import Direction, Item, Json

__all__ = ["HOOK", "model_items", "multi_token_items"]

HOOK = "output_processor"
LOSS = "self.compute_language_model_loss"
LAYER = "self.output_layer"
_DELEGATE = "self._postprocess"
_MTP_MODULE = "megatron/core/transformer/multi_token_prediction.py"


def _where(path: str, node: ast.AST | None) -> str:
    return f"{getattr(node, ORIGIN, path)}:{getattr(node, 'lineno', 0)}" if node is not None else ""


def _in_loop(function: ast.FunctionDef) -> set[ast.AST]:
    return {inner for loop in loop_bodies(function) for inner in ast.walk(loop)}


def _outside_loops(function: ast.FunctionDef, callee: str) -> list[ast.Call]:
    """Calls of ``callee`` that are not in a loop: loops over multi-token prediction's depths have their own head."""
    looped = _in_loop(function)
    return [call for call in calls(function) if text(call.func) == callee and call not in looped]


def _is(*made: ast.Call | None) -> Callable[[ast.expr], bool]:
    return lambda value: any(value is call for call in made)


def _asks_loss(call: ast.Call) -> bool:
    return text(call.func).endswith("compute_language_model_loss")


def _texts(operations: list[Operation]) -> list[Json]:
    return [operation.text for operation in operations]


@dataclass(frozen=True)
class _Head:
    """The function in which the head runs, and what forward hands over to it."""

    forward: FunctionRef
    function: FunctionRef | None  # None: forward delegates to a method that is not there
    delegate: str | None  # ``_postprocess`` or None where forward is whole
    handover: ast.Call | None


def _locate(index: ModuleIndex, model: ClassRef, forward: FunctionRef) -> _Head:
    wanted = frozenset({HOOK, LOSS, LAYER, _DELEGATE})
    inline = Inliner(index, model, wanted)
    forward = inline(forward)
    handover = call_of(forward.node, _DELEGATE)
    if handover is None:
        return _Head(forward, forward, None, None)
    function = index.method(model, "_postprocess")
    return _Head(forward, inline(function) if function is not None else None, "_postprocess", handover)


def model_items(index: ModuleIndex, prefix: str, class_name: str, *modules: str) -> Iterator[Item]:
    """Items of one model class; a class that upstream does not have gives one item with value None."""
    model = index.find_class(class_name, *modules)
    if model is None:
        yield Item(f"{prefix}.class", Direction.READ, None)
        return
    bases: list[Json] = [text(base).rpartition(".")[2] for base in model.node.bases]
    yield Item(f"{prefix}.class", Direction.READ, {"module": index.module_of(model.path), "bases": bases}, model.where)
    call_override = index.method(model, "__call__")
    yield Item(
        f"{prefix}.__call__",
        Direction.READ,
        text(call_override.node.body[-1]) if call_override else None,
        call_override.where if call_override else "",
    )
    forward = index.method(model, "forward")
    if forward is None:
        yield Item(f"{prefix}.forward", Direction.REPLACE, None)
        return
    yield Item(f"{prefix}.forward", Direction.REPLACE, list(forward.signature), forward.where)
    for name, direction in (
        ("_preprocess", Direction.READ),
        ("_postprocess", Direction.READ),
        ("build_schedule_plan", Direction.CALL),
    ):
        method = index.method(model, name)
        value: Json = list(method.signature) if method else None
        yield Item(f"{prefix}.{name}", direction, value, method.where if method else "")
    head = _locate(index, model, forward)
    yield from _hook_items(index, prefix, model, head)
    yield from _head_items(index, prefix, model, head)


def _hook_items(index: ModuleIndex, prefix: str, model: ClassRef, head: _Head) -> Iterator[Item]:
    accepted = any(part.partition("=")[0] == HOOK for part in head.forward.signature)
    body = head.function.node if head.function else None
    call = call_of(body, HOOK) if body is not None else None
    if call is not None and head.handover is not None:
        passed = {keyword.arg: text(keyword.value) for keyword in head.handover.keywords}
        if passed.get(HOOK) != HOOK:
            call = None
    conditions = _conditions(head.function.node, call) if head.function is not None and call is not None else None
    if conditions is not None and {"False", "None", "0"} & set(conditions):
        call = conditions = None
    receiver = _receiver(index, model, head) if call is None else None
    ignored = f"handed to {receiver}" if receiver else "accepted and ignored"
    status = "absent" if not accepted else ("called" if call is not None else ignored)
    if accepted and head.function is None:
        status = "unreachable"  # the head's own item says why
    yield Item(f"{prefix}.hook", Direction.CALLED_BY, status, _where(head.forward.path, head.forward.node))
    arguments: Json = None
    returned: Json = None
    where = ""
    if accepted and call is not None and head.function is not None:
        where = _where(head.function.path, call)
        arguments = {keyword.arg or "**": text(keyword.value) for keyword in call.keywords}
        arguments.update({f"#{n}": text(argument) for n, argument in enumerate(call.args)})
        returned = _returned(head.function.node, call)
    yield Item(f"{prefix}.hook.arguments", Direction.CALLED_BY, arguments, where)
    yield Item(f"{prefix}.hook.result", Direction.CALLED_BY, returned, where)
    yield Item(f"{prefix}.hook.conditions", Direction.CALLED_BY, conditions if accepted else None, where)


def _receiver(index: ModuleIndex, model: ClassRef, head: _Head) -> str | None:
    """What is given the hook, and may call it where the source does not show it."""
    for call in calls(head.function.node) if head.function is not None else ():
        if call is head.handover or not _gives(call, HOOK):
            continue
        callee = text(call.func)
        own = index.method(model, callee.removeprefix("self.")) if callee.startswith("self.") else None
        parameter = bound_name(own.node, call, HOOK) if own is not None else None
        if own is None or parameter is None or any(_gives(inner, parameter) for inner in calls(own.node)):
            return callee
    return None


def _gives(call: ast.Call, name: str) -> bool:
    return any(text(one) == name for one in (*call.args, *(keyword.value for keyword in call.keywords)))


def _conditions(function: ast.FunctionDef, call: ast.Call) -> tuple[str, ...]:
    """The conditions under which a call is made."""
    holders = [
        guards
        for statement, guards in walk_guarded(function.body)
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try) and call in ast.walk(statement)
    ]
    return holders[0] if holders else ()


def _returned(function: ast.FunctionDef, call: ast.Call) -> str:
    """``verbatim`` where the call's result is the function's result, else what is done with it."""
    if any(isinstance(node, ast.Return) and node.value is call for node in ast.walk(function)):
        return "verbatim"
    done = [operation.text for operation in follow_value(function.body, start=_is(call))]
    return "verbatim" if done and all(one.endswith("return @") for one in done) else "; ".join(done) or "dropped"


_EVENTS = {
    "self.shared_embedding_or_output_weight": "weight",
    "self.mtp": "mtp",
    "process_mtp_loss": "mtp loss",
    HOOK: "hook",
    LAYER: "head",
    "self._scale_logits": "scale",
    "log_config_to_disk": "log",
    LOSS: "loss",
}


def _events(function: ast.FunctionDef) -> list[Json]:
    """The order in which the function does what we rely on."""
    looped = _in_loop(function)
    returns: dict[ast.AST, str] = {}
    for statement, guards in walk_guarded(function.body):
        if isinstance(statement, ast.Return) and guards == ("not self.post_process",):
            returns[statement] = "other stages return"
        elif isinstance(statement, ast.Return) and "labels is None" in guards:
            returns[statement] = "logits return"
    ordered: dict[str, None] = {}
    for node in walk_in_order(function):
        name = returns.get(node)
        if isinstance(node, ast.Call):
            name = _EVENTS.get(text(node.func))
            if name in {"head", "loss"} and node in looped:
                name = "mtp loss" if name == "loss" else None
        if name:
            ordered.setdefault(name)
    return list(ordered)


def _head_items(index: ModuleIndex, prefix: str, model: ClassRef, head: _Head) -> Iterator[Item]:
    function = head.function
    if function is None:
        missing: Json = f"forward calls self.{head.delegate}, which is not defined"
        yield Item(f"{prefix}.head", Direction.REPLACE, missing, _where(head.forward.path, head.handover))
        return
    body = function.node.body
    heads = _outside_loops(function.node, LAYER)
    loss = next(iter(_outside_loops(function.node, LOSS)), None)
    if not heads and loss is None:
        yield Item(f"{prefix}.head", Direction.REPLACE, None)
        return
    in_function: Json = head.delegate or "forward"
    yield Item(f"{prefix}.head", Direction.REPLACE, in_function, function.where)
    yield Item(f"{prefix}.head.order", Direction.REPLACE, _events(function.node), function.where)
    where = _where(function.path, heads[0] if heads else loss)
    yield Item(f"{prefix}.head.call", Direction.REPLACE, _call_value(function.node, heads, loss), where)
    if heads:
        # A call with other arguments asks the layer for something else than logits; head.call shows it.
        plain = [head_call for head_call in heads if keywords_of(head_call, body).keys() <= _HEAD_KEYWORDS]
        operations = follow_value(body, start=_is(*plain), end=_asks_loss)
        yield Item(f"{prefix}.head.logits", Direction.REPLACE, _texts(operations), where)
        yield Item(f"{prefix}.head.callees", Direction.REPLACE, _callees(index, model, operations))
    result = follow_value(body, start=_is(loss)) if loss is not None else []
    yield Item(f"{prefix}.head.loss", Direction.REPLACE, _loss_value(head, loss, result), _where(function.path, loss))
    yield Item(f"{prefix}.head.weight", Direction.REPLACE, _weight_rule(index, model))
    yield Item(f"{prefix}.head.layer", Direction.READ, _layer_value(index, model))


_HEAD_KEYWORDS = {"input_", "weight", "runtime_gather_output"}


def _call_value(function: ast.FunctionDef, heads: list[ast.Call], loss: ast.Call | None) -> Json:
    """How the head is called (arguments of all calls together), or what makes the loss's logits instead."""
    arguments: dict[str, Json] = {}
    for call in heads:
        arguments.update({f"#{n}": text(argument) for n, argument in enumerate(call.args)})
        arguments.update({name: text(value) for name, value in keywords_of(call, function.body).items()})
    if heads:
        return {"callee": LAYER, "arguments": arguments}
    wanted = text(loss.args[1]) if loss is not None and len(loss.args) > 1 else None
    producer: Json = None
    for statement, _ in walk_guarded(function.body):
        if isinstance(statement, ast.Assign) and wanted is not None and isinstance(statement.value, ast.Call):
            first = statement.targets[0]
            target = first.elts[0] if isinstance(first, ast.Tuple) and first.elts else first
            if text(target) == wanted and not any(text(argument) == wanted for argument in statement.value.args):
                producer = text(statement.value.func)
    return {"callee": producer, "arguments": None}


def _callees(index: ModuleIndex, model: ClassRef, operations: list[Operation]) -> dict[str, Json]:
    """What the model's own methods that take the logits do with them."""
    found: dict[str, Json] = {}
    for operation in operations:
        name = (operation.callee or "").removeprefix("self.")
        if not (operation.callee or "").startswith("self.") or "." in name or operation.callee == LOSS:
            continue
        method = index.method(model, name)
        if method is None or len(method.node.args.args) < 2:
            continue
        parameter = method.node.args.args[1].arg
        found[name] = _texts(follow_value(method.node.body, parameter=parameter))
    return found


def _loss_value(head: _Head, loss: ast.Call | None, result: list[Operation]) -> Json:
    """How the loss is asked for, what happens to its result, and who touched the labels before."""
    if loss is None or head.function is None:
        return None
    changed = [
        text(statement)
        for function in {head.forward.where: head.forward, head.function.where: head.function}.values()
        for statement, _ in walk_guarded(function.node.body)
        if _assigns(statement, "labels")
    ]
    if head.handover is not None:
        passed = {keyword.arg: text(keyword.value) for keyword in head.handover.keywords}.get("labels", "positional")
        if passed not in {"labels", "positional"}:
            changed.append(f"labels={passed}")
    arguments: list[Json] = [
        *(text(a) for a in loss.args),
        *(f"{k.arg or '**'}={text(k.value)}" for k in loss.keywords),
    ]
    return {"arguments": arguments, "labels": list[Json](changed) or "untouched", "result": _texts(result)}


def _assigns(statement: ast.stmt, name: str) -> bool:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        targets = [statement.target]
    names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return name in names


def _weight_rule(index: ModuleIndex, model: ClassRef) -> Json:
    """Which weight a tied model's head uses: condition and result, in order."""
    method = index.method(model, "shared_embedding_or_output_weight")
    if method is None:
        return None
    return [
        f"{' and '.join(guards) or 'else'}: {text(statement.value)}"
        for statement, guards in walk_guarded(method.node.body)
        if isinstance(statement, ast.Return) and statement.value is not None
    ]


_LAYER_KEYWORDS = ("bias", "skip_bias_add", "gather_output", "skip_weight_param_allocation", "tp_group")


def _layer_value(index: ModuleIndex, model: ClassRef) -> Json:
    """Which classes the output layer can be, and the constructor arguments that matter to us."""
    init = index.own_method(model, "__init__").function
    constructor = init.node.body if init is not None else []
    found: list[Json] = []
    for statement, _ in walk_guarded(constructor):
        if not isinstance(statement, ast.Assign) or [text(target) for target in statement.targets] != [LAYER]:
            continue
        if isinstance(statement.value, ast.Call):
            given = {keyword.arg: text(keyword.value) for keyword in statement.value.keywords}
            kept: dict[str, Json] = {key: given[key] for key in _LAYER_KEYWORDS if key in given}
            found.append({"classes": _class_names(constructor, statement.value.func), "arguments": kept})
    if found:
        return found
    return next((value for base in index.bases(model) if (value := _layer_value(index, base))), None)


def _class_names(constructor: list[ast.stmt], callee: ast.expr) -> list[str]:
    """Class names behind a callee; a local variable stands for everything assigned to it."""
    if isinstance(callee, ast.Name):
        assigned = [
            branch
            for statement, _ in walk_guarded(constructor)
            if isinstance(statement, ast.Assign) and [text(target) for target in statement.targets] == [callee.id]
            for branch in _branches(statement.value)
        ]
        if assigned:
            return sorted({text(value).rpartition(".")[2] for value in assigned})
    return [text(callee).rpartition(".")[2]]


def _branches(value: ast.expr) -> list[ast.expr]:
    """The values of a conditional expression."""
    if isinstance(value, ast.IfExp):
        return [*_branches(value.body), *_branches(value.orelse)]
    return [value]


def multi_token_items(index: ModuleIndex) -> Iterator[Item]:
    """What multi-token prediction does with its own logits, wherever this release computes its loss."""
    model = index.find_class("GPTModel", "megatron.core.models.gpt.gpt_model")
    candidates = [index.method(model, "_postprocess") if model else None]
    candidates.append(index.function(_MTP_MODULE, "process_mtp_loss"))
    candidates.append(index.function(_MTP_MODULE, "forward", "MultiTokenPredictionBlock"))
    for function in filter(None, candidates):
        for loop in loop_bodies(function.node):
            heads = [call for call in calls(loop) if text(call.func) in {LAYER, "output_layer"}]
            plain = [call for call in heads if keywords_of(call, loop.body).keys() <= _HEAD_KEYWORDS]
            if not plain:
                continue
            operations = follow_value(loop.body, start=_is(*plain), end=_asks_loss)
            yield Item("mtp.logits", Direction.REPLACE, _texts(operations), _where(function.path, plain[0]))
            yield Item("mtp.place", Direction.READ, f"{function.node.name}", function.where)
            return
    yield Item("mtp.logits", Direction.REPLACE, None)
    yield Item("mtp.place", Direction.READ, None)
