"""Text for people: made safe for terminals, Markdown, XML and HTML, and cut at words. Pure.

A message may hold anything that a failing check printed: colours, a null, half of a surrogate pair, marks that
reverse the direction of writing. None of it carries meaning here, and each of them can make a format unreadable or let
a message look like something else. Every format cleans what it is given, wherever it came from.
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel

from mcore_compat.files.untrusted import printable

__all__ = ["cleaned", "sentence", "shortened"]

_printable = functools.lru_cache(maxsize=4096)(printable)


def _all(value: Any) -> Any:
    if type(value) is str:  # a verdict is a string too, and stays what it is
        return _printable(value)
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
