"""The vocabulary of this room: a use, the guards around it, arguments and signatures. Pure data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Arguments", "Guard", "GuardKind", "Parameter", "Signature", "Use", "UseKind", "signature_of_node"]


class UseKind(StrEnum):
    """How a symbol is used."""

    IMPORT = "import"
    STAR = "star-import"
    ATTRIBUTE = "attribute"
    CALL = "call"
    FIELD = "field"
    STORE = "store"
    PATCH = "patch"
    SUBCLASS = "subclass"
    OVERRIDE = "override"
    SUPER = "super-call"
    STRING = "string"
    KEY = "key"


class GuardKind(StrEnum):
    """What may keep a use from being reached, or hide its failure.

    Attributes:
        TRY: a handler catches what goes wrong here.
        HANDLER: reached only after something in the ``try`` body failed.
        PRESENT: a ``hasattr`` of the symbols, or ``getattr`` with a default.
        ABSENT: the other branch of such a test.
        VERSION: a test of Megatron's version.
        SIGNATURE: a test of a function's own parameters.
        KEY: a test for a key, which is ``text``, of a dictionary.
        TYPING: for type checkers only.
        LAZY: inside a function.
        UNKNOWN: a version test in a form that is not understood.
    """

    TRY = "try"
    HANDLER = "handler"
    PRESENT = "present"
    ABSENT = "absent"
    VERSION = "version"
    SIGNATURE = "signature"
    KEY = "key"
    TYPING = "typing"
    LAZY = "lazy"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Guard:
    """One guard.

    Attributes:
        kind: which.
        symbols: what it is about: the tested symbols, or those whose failure leads to the handler.
        operator: of a version test, such as ``>=``.
        text: the version, the key, or the exceptions that are caught, separated by spaces.
    """

    kind: GuardKind
    symbols: tuple[str, ...] = ()
    operator: str = ""
    text: str = ""


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call.

    Attributes:
        positional: how many are given by position, not counting a starred one.
        keywords: names given by keyword.
        open_positional: a ``*args`` is handed over.
        open_keywords: a ``**kwargs`` is handed over.
        partial: more may be given later, as by ``functools.partial``.
    """

    positional: int = 0
    keywords: tuple[str, ...] = ()
    open_positional: bool = False
    open_keywords: bool = False
    partial: bool = False

    @classmethod
    def of_call(cls, call: ast.Call, *, skip: int = 0, partial: bool = False) -> Arguments:
        """Arguments of a call expression, less the first ``skip`` positional ones."""
        given = call.args[skip:]
        starred = any(isinstance(argument, ast.Starred) for argument in given)
        return cls(
            positional=sum(not isinstance(argument, ast.Starred) for argument in given),
            keywords=tuple(keyword.arg for keyword in call.keywords if keyword.arg),
            open_positional=starred,
            open_keywords=any(keyword.arg is None for keyword in call.keywords),
            partial=partial,
        )


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``kind`` is ``/``, ``""`` (either way), ``*`` (keyword only), ``*args`` or ``**kwargs``."""

    name: str
    kind: str = ""
    required: bool = True


@dataclass(frozen=True)
class Signature:
    """Parameters of a function in order."""

    parameters: tuple[Parameter, ...] = ()

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    @property
    def positional(self) -> tuple[Parameter, ...]:
        """Those that take a positional argument."""
        return tuple(p for p in self.parameters if p.kind in {"/", ""})

    @property
    def names(self) -> frozenset[str]:
        """Names that a keyword can give."""
        return frozenset(p.name for p in self.parameters if p.kind in {"", "*"})

    @property
    def open_positional(self) -> bool:
        """Whether there is a ``*args``."""
        return any(p.kind == "*args" for p in self.parameters)

    @property
    def open_keywords(self) -> bool:
        """Whether there is a ``**kwargs``."""
        return any(p.kind == "**kwargs" for p in self.parameters)

    def bound(self) -> Signature:
        """Without the first positional parameter, as on an instance."""
        first = next((p for p in self.parameters if p.kind in {"/", ""}), None)
        return Signature(tuple(p for p in self.parameters if p is not first))

    def problem(self, arguments: Arguments) -> str:
        """Why a call with these arguments raises ``TypeError``; "" where it does not, as far as can be seen."""
        places = self.positional
        unknown = [name for name in arguments.keywords if name not in self.names]
        if unknown and not self.open_keywords:
            return f"no parameter {unknown[0]!r}"
        if arguments.positional > len(places) and not self.open_positional:
            return f"takes {len(places)} positional arguments, {arguments.positional} are given"
        by_place = {p.name for p in places[: arguments.positional] if p.kind == ""}
        if twice := [name for name in arguments.keywords if name in by_place]:
            return f"{twice[0]!r} is given by position and by keyword"
        if arguments.partial or arguments.open_keywords:
            return ""
        given = by_place | set(arguments.keywords)
        for index, parameter in enumerate(self.parameters):
            if not parameter.required or parameter.kind in {"*args", "**kwargs"}:
                continue
            if parameter.kind != "/" and parameter.name in given:  # a keyword never reaches a positional-only one
                continue
            if parameter.kind != "*" and (index < arguments.positional or arguments.open_positional):
                continue
            return f"required parameter {parameter.name!r} is not given"
        return ""

    def __str__(self) -> str:
        marks = {"*args": "*", "**kwargs": "**"}
        return ", ".join(
            f"{marks.get(p.kind, '')}{p.name}{'' if p.required or p.kind in marks else '='}" for p in self.parameters
        )


def signature_of_node(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Signature:
    """Signature of a definition as written."""
    found = node.args
    places = [*((p, "/") for p in found.posonlyargs), *((p, "") for p in found.args)]
    required = len(places) - len(found.defaults)
    parameters = [Parameter(p.arg, kind, index < required) for index, (p, kind) in enumerate(places)]
    if found.vararg:
        parameters.append(Parameter(found.vararg.arg, "*args", required=False))
    parameters += [
        Parameter(p.arg, "*", default is None) for p, default in zip(found.kwonlyargs, found.kw_defaults, strict=True)
    ]
    if found.kwarg:
        parameters.append(Parameter(found.kwarg.arg, "**kwargs", required=False))
    return Signature(tuple(parameters))


@dataclass(frozen=True)
class Use:
    """One use of an upstream symbol.

    Attributes:
        symbol: absolute dotted name, as ``megatron.core.utils.unwrap_model``.
        kind: how.
        file: path relative to the source's root.
        line: first line, from 1.
        root: the imported name that the symbol was reached through; where that is missing, the import is to blame.
        guards: from the outside in.
        arguments: of a call.
        signature: of the adopter's own function that overrides or replaces the symbol.
        bound: reached through an instance, so the first parameter is given.
        alternatives: other symbols that the same name may be bound to, in the order in which they are tried.
        fallback: the name has another binding that is not upstream's, for when the import fails.
        unpack: how many targets the result of a call is unpacked into; 0: it is not.
        key: of a dictionary that is read.
        called_here: of an override: its own class calls it too, through ``self``.
    """

    symbol: str
    kind: UseKind
    file: str
    line: int
    root: str = ""
    guards: tuple[Guard, ...] = ()
    arguments: Arguments | None = None
    signature: Signature | None = None
    bound: bool = False
    alternatives: tuple[str, ...] = field(default=())
    fallback: bool = False
    unpack: int = 0
    key: str = ""
    called_here: bool = False

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"

    def guarded(self, *kinds: GuardKind) -> bool:
        """Whether one of these guards is around it."""
        return any(guard.kind in kinds for guard in self.guards)
