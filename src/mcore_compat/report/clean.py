"""Text from cells, made safe for terminals, Markdown, XML and HTML. Pure.

A message may hold anything that a failing check printed: colours, a null, half of a surrogate pair, marks that
reverse the direction of writing. None of it carries meaning here, and each of them can make a format unreadable or let
a message look like something else.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Any

from pydantic import BaseModel

__all__ = ["clean", "cleaned", "sentence", "shortened"]

# Escape sequences of terminals: CSI (colours, cursor), OSC (titles, links), and two-character ones.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_KEPT = "\t\n"
# Cc: control; Cs: half a surrogate pair; Cf below: marks that change the direction of what follows.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_LINE_ENDS = {"\u2028": "\n", "\u2029": "\n", "\x85": "\n", "\x0b": "\n", "\x0c": "\n"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _safe(character: str) -> str:
    if character in _KEPT:
        return character
    if character in _LINE_ENDS:
        return _LINE_ENDS[character]
    code = ord(character)
    unwritable = code in {0xFFFE, 0xFFFF} or code & 0xFFFE == 0xFFFE
    if unwritable or character in _DIRECTION or unicodedata.category(character) in {"Cc", "Cs"}:
        return _REPLACEMENT
    return character


@functools.lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """The text without escape sequences; any other character that a format cannot hold becomes U+FFFD."""
    text = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii() and all(character in _KEPT or " " <= character <= "~" for character in text):
        return text
    return "".join(map(_safe, text))


def _all(value: Any) -> Any:
    if type(value) is str:  # a verdict is a string too, and stays what it is
        return clean(value)
    if isinstance(value, BaseModel):
        # Fields only: nothing here is validated again, since only texts change.
        return value.model_copy(update={name: _all(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, dict):
        return {_all(key): _all(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_all, value))
    if isinstance(value, list):
        return list(map(_all, value))
    return value


def cleaned[Model: BaseModel](model: Model) -> Model:
    """The same report with every text in it cleaned."""
    result: Model = _all(model)
    return result


def shortened(text: str, limit: int) -> str:
    """At most ``limit`` characters, cut between words and not inside a pair of backticks."""
    if len(text) <= limit:
        return text
    cut = text[: limit - 1].rsplit(" ", 1)[0] if " " in text[: limit - 1] else text[: limit - 1]
    if cut.count("`") % 2:
        cut = cut[: cut.rindex("`")].rstrip() or cut.replace("`", "")
    return f"{cut.rstrip(' ,;:')}…"


def sentence(words: str, end: str = ".") -> str:
    """The words with a capital letter and an end; a first word that is a name or code stays as it is."""
    start = words[:1].upper() + words[1:] if words.split(" ", 1)[0].isalpha() else words
    return start if start.endswith((end, ".", "…")) else f"{start}{end}"
