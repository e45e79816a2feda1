"""The signature under which a resolved symbol is called; None where it cannot be read from source."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_compat.usage.model import Arguments, Parameter, Signature
from mcore_compat.usage.resolve import Resolver, State, Target
from mcore_compat.usage.summary import signature_from

__all__ = ["call_problem", "signatures_of"]

_TRANSPARENT = frozenset(
    {
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "compile",
        "contextmanager",
        "custom_bwd",
        "custom_fwd",
        "deprecate_inference_params",
        "deprecated",
        "disable",
        "dynamo_disable",
        "experimental_cls",
        "experimental_fn",
        "final",
        "inference_mode",
        "internal_api",
        "jit_fuser",
        "lru_cache",
        "no_grad",
        "noop_decorator",
        "nvtx_decorator",
        "overload",
        "override",
        "record_function",
        "runtime_checkable",
        "script",
        "wraps",
    }
)


def signatures_of(resolver: Resolver, target: Target, *, bound: bool) -> tuple[Signature, ...] | None:
    """Signatures of one definition; several for overloads, None if unknown.

    Args:
        resolver: of the tree.
        target: a function or class.
        bound: reached through an instance.
    """
    if target.kind == "function":
        return _of_function(resolver, target, bound=bound or target.bound)
    if target.kind == "class" and not target.instance:
        return _of_class(resolver, target)
    return None


def call_problem(resolver: Resolver, targets: tuple[Target, ...], arguments: Arguments, *, bound: bool) -> str:
    """Why such a call fails whichever definition is in force; "" where one may take it or is not known."""
    problems = []
    for target in targets:
        if target.kind == "value" and target.data in {":None", ":False"}:
            continue
        found = signatures_of(resolver, target, bound=bound)
        if found is None:
            return ""
        each = [signature.problem(arguments) for signature in found]
        if not each or not all(each):
            return ""
        problems.append(each[0])
    return problems[0] if problems else ""


def _of_function(resolver: Resolver, target: Target, *, bound: bool) -> tuple[Signature, ...] | None:
    parameters, decorators = target.data[2], target.data[3]
    signature = signature_from(parameters)
    names = {name.rpartition(".")[2] for name in decorators}
    if names & {"property", "cached_property", "setter"}:
        return None
    for decorator in decorators:
        name = decorator.rpartition(".")[2]
        if (
            name in {"staticmethod", "classmethod"}
            or name in _TRANSPARENT
            or _hands_through(resolver, target, decorator)
        ):
            continue
        return None
    if target.method and "staticmethod" not in names and (bound or "classmethod" in names):
        signature = signature.bound()
    return (signature,)


def _hands_through(resolver: Resolver, target: Target, decorator: str) -> bool:
    state, found = resolver.in_module(target.module, decorator)
    return state is State.PRESENT and bool(found) and all(t.kind == "function" and t.data[4] == 1 for t in found)


def _of_class(resolver: Resolver, target: Target) -> tuple[Signature, ...] | None:
    if any("metaclass" in k and "ABCMeta" not in k for k in target.data.get("keywords", ())):
        return None
    decorators = [d for d in target.data.get("decorators", ()) if "dataclass" not in d]
    if any(d.partition("(")[0].rpartition(".")[2] not in _TRANSPARENT for d in decorators):
        return None
    owners = list(resolver.mro(target))
    for owner in owners:
        if owner.kind != "class":
            if owner.module in {"object", "builtins.object", "abc.ABC", "typing.Generic"}:
                continue
            return None
        if "__new__" in owner.data["members"]:
            return None
        if "__init__" in owner.data["members"]:
            bindings = owner.data["members"]["__init__"]
            if any(binding[0] != "f" or not _all_transparent(binding[3]) for binding in bindings):
                return None
            return tuple(signature_from(binding[2]).bound() for binding in bindings)
        if _dataclass_options(owner) is not None:
            return _generated(owners[owners.index(owner) :])
    return (Signature(),)


def _all_transparent(decorators: list[str]) -> bool:
    return all(name.rpartition(".")[2] in _TRANSPARENT for name in decorators)


def _dataclass_options(owner: Target) -> str | None:
    """Arguments of a dataclass decorator that makes an ``__init__``; None if there is none."""
    for decorator in owner.data.get("decorators", ()):
        name, _, options = decorator.partition("(")
        if name.rpartition(".")[2] == "dataclass":
            return None if "init=False" in options else options
    return None


def _generated(owners: list[Target]) -> tuple[Signature, ...] | None:
    fields: dict[str, Parameter] = {}
    for owner in reversed(owners):
        if owner.kind != "class":
            if external_is_plain(owner.module):
                continue
            return None
        options = _dataclass_options(owner)
        if options is None:
            continue
        for parameter in _fields(owner, keyword_only="kw_only=True" in options):
            if parameter.kind == "no":
                fields.pop(parameter.name, None)
            else:
                fields[parameter.name] = parameter
    ordered = sorted(fields.values(), key=lambda parameter: parameter.kind == "*")
    return (Signature(tuple(ordered)),)


def external_is_plain(dotted: str) -> bool:
    """Whether a base outside of Megatron adds no fields of its own."""
    return dotted in {"builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol"}


def _fields(owner: Target, *, keyword_only: bool) -> Iterator[Parameter]:
    rest = keyword_only
    for name, bindings in owner.data["members"].items():
        binding = bindings[-1]
        if binding[0] not in {"v", "d"} or len(binding) < 5:
            continue
        annotation, required, place = binding[2], binding[3], binding[4]
        if "ClassVar" in annotation:
            continue
        if annotation.rpartition(".")[2] == "KW_ONLY":
            rest = True
            continue
        yield Parameter(name, "no" if place == "no" else "*" if rest or place == "kw" else "", bool(required))
