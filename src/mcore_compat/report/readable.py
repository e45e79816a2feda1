"""Strict parsers for every format: what cannot be read back is not written, since an unreadable file looks green."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from html.parser import HTMLParser

from mcore_compat.files.untrusted import parsed_json, printable

__all__ = ["unreadable"]

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
_ANNOTATION = re.compile(r"::(error|warning|notice) ([a-z]+=[^,:]*)(,[a-z]+=[^,:]*)*::.*")
_SARIF_LEVELS = frozenset({"error", "warning", "note"})


class _Page(HTMLParser):
    """Refuses elements that are not closed in order, ids that are used twice, links that lead nowhere, and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One more open element."""
        if tag == "script":
            raise ValueError("there is a script in it")
        if tag not in _VOID:
            self.open.append(tag)
        given = dict(attrs)
        name, target = given.get("id"), given.get("href")
        if name is not None:
            if name in self.ids:
                raise ValueError(f"the id {name} is used twice")
            self.ids.add(name)
        if target is not None and target.startswith("#"):
            self.targets.add(target[1:])

    def handle_endtag(self, tag: str) -> None:
        """It must be the innermost one."""
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes another element")


def _html(text: str) -> None:
    page = _Page()
    page.feed(text)
    page.close()
    if page.open:
        raise ValueError(f"<{page.open[-1]}> is not closed")
    if page.targets - page.ids:
        raise ValueError(f"a link leads to {min(page.targets - page.ids)}, which is not there")


def _xml(text: str) -> None:
    root = ET.fromstring(text)  # noqa: S314 - our own text: it is read to see that others can
    for suite in root.iter("testsuite"):
        for key, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            if int(suite.get(key, "0")) != sum(1 for _ in suite.iter(tag)):
                raise ValueError(f"the number of {key} is wrong in {suite.get('name')}")


def _json(text: str) -> None:
    parsed_json(text)


def _sarif(text: str) -> None:
    log = parsed_json(text)
    for run in log["runs"]:
        rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
        for result in run["results"]:
            if result["ruleId"] not in rules or result["level"] not in _SARIF_LEVELS or not result["message"]["text"]:
                raise ValueError(f"a result of {result['ruleId']} has no rule, level or text")


def _markdown(text: str) -> None:
    fences = sum(line.lstrip().startswith("```") for line in text.splitlines())
    if fences % 2:
        raise ValueError("a block of code is not closed")


def _annotations(text: str) -> None:
    for line in text.splitlines():
        if not _ANNOTATION.fullmatch(line):
            raise ValueError(f"not a workflow command: {line[:80]}")


_PARSERS: Mapping[str, Callable[[str], None]] = {
    "html": _html,
    "xml": _xml,
    "json": _json,
    "sarif": _sarif,
    "md": _markdown,
    "txt": _annotations,
}


def unreadable(name: str, text: str) -> str:
    """Why the text is not a file of its format, or "" if it is.

    Args:
        name: the file's name; its ending says the format.
        text: what would be written.
    """
    try:
        text.encode("utf-8")
        if printable(text) != text:
            return "it holds control characters"
        _PARSERS[name.rpartition(".")[2]](text)
    except (ValueError, KeyError, TypeError, ET.ParseError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
