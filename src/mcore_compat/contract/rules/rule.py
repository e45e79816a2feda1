"""The rules: one TOML file each in ``compat_matrix/rules/``, read into strict models."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mcore_compat import verdicts
from mcore_compat.contract.model import Direction
from mcore_compat.contract.rules.predicates import CHANGES, STATES
from mcore_compat.errors import UsageError
from mcore_compat.matrix.toml_file import DataModel, load_model

__all__ = ["LEVELS", "MODES", "Rule", "RuleError", "Witness", "load_rules"]

Level = Literal["break", "drift", "info"]
# In the order of all levels.
LEVELS: tuple[Level, ...] = tuple(level for level in verdicts.LEVELS if level != "unproven")
# The modes of ours that a change can concern, in the order in which reports list them.
MODES: dict[str, str] = {
    "hook": "hook mode (GPTModel 0.18 and newer)",
    "legacy": "legacy mode (the deferred head)",
    "packing": "packed sequences",
    "wrappers": "wrapped models (DDP, Float16Module, FSDP, VLM)",
    "plan": "1F1B schedule plan",
    "install": "installing and importing",
    "copy": "a patch that copies upstream's forward (not ours; verl's legacy mode does)",
}
Text = Annotated[str, Field(min_length=10)]


class RuleError(UsageError):
    """A rule file is not a valid rule."""


class Witness(DataModel):
    """A few lines that pass on a megatron-core without the finding and fail on one with it.

    ``$detail`` and ``$item`` stand for the finding's own. With ``prelude`` the lines find ``Stub`` and
    ``trace_forward`` defined (:mod:`mcore_compat.gate.witness_prelude`). Lines that end in another exception than the
    one in ``fails_with`` say nothing.
    """

    code: Text
    prelude: bool = False
    fails_with: Literal["AssertionError", "AttributeError", "ImportError", "TypeError"] = "AssertionError"
    isolated: Annotated[bool, Field(description="needs a process in which megatron was not imported yet")] = False

    @model_validator(mode="after")
    def _parses(self) -> Self:
        try:
            compile(self.code.replace("$detail", "d").replace("$item", "i"), "witness", "exec")
        except SyntaxError as error:
            raise ValueError(f"the witness does not parse: {error} | correct its code") from error
        return self


class Rule(DataModel):
    """One thing that can be wrong, or change, and what it means for us."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    direction: Annotated[Direction, Field(strict=False)]
    level: Level
    items: Annotated[list[str], Field(min_length=1, description="ids of contract items, * allowed")]
    at: Annotated[str | None, Field(description="key inside the item's value that is looked at")] = None
    check: Annotated[str, Field(description="name of a predicate")]
    arguments: dict[str, Any] = Field(default_factory=dict)
    meaning: Annotated[Text, Field(description="one sentence; {detail} and {item} are filled in")]
    example: Text
    link: Annotated[str, Field(pattern=r"^https://")]
    consequence: Annotated[dict[str, Text], Field(min_length=1)]
    witness: Witness | None = None
    unwitnessed: Annotated[Text | None, Field(description="why there is no witness")] = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.check not in STATES and self.check not in CHANGES:
            raise ValueError(f"there is no predicate {self.check!r} | use one of {', '.join([*STATES, *CHANGES])}")
        unknown = sorted(set(self.consequence) - set(MODES))
        if unknown:
            raise ValueError(f"unknown mode {unknown[0]!r} in consequence | use {', '.join(MODES)}")
        if (self.witness is None) is (self.unwitnessed is None):
            raise ValueError("a rule has a witness, or says in `unwitnessed` why none | give one of them")
        if set(re.findall(r"\{(\w*)\}", self.meaning)) - {"detail", "item"}:
            raise ValueError("meaning may only hold {detail} and {item} | double other braces")
        return self

    @property
    def is_change(self) -> bool:
        """Whether the rule compares two values; otherwise it judges one."""
        return self.check in CHANGES

    def concerns(self, item_id: str) -> bool:
        """Whether the rule looks at an item."""
        return any(fnmatchcase(item_id, pattern) for pattern in self.items)


def load_rules(folder: Path) -> tuple[Rule, ...]:
    """All rules, by id.

    Raises:
        RuleError: there are none, one is not valid, or a file is not named after its rule.
    """
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise RuleError(f"there are no rules in {folder.name}/.", "run inside a checkout, or name one with --root.")
    rules = []
    for path in paths:
        rule = load_model(path, Rule, RuleError)
        if rule.id != path.stem:
            raise RuleError(f"{path.name} holds the rule {rule.id!r}.", "name the file after the rule.")
        rules.append(rule)
    return tuple(rules)
