"""Small sources on both sides, written here: an adopter's files and an upstream tree."""

from __future__ import annotations

from textwrap import dedent

from mcore_compat.usage.check import Side, check_uses
from mcore_compat.usage.extract import Extracted, extract_uses
from mcore_compat.usage.findings import UsageFinding
from mcore_compat.usage.model import Use
from mcore_compat.usage.resolve import Resolver
from mcore_compat.usage.sources import AdopterSource
from mcore_compat.usage.upstream import SummaryCache, UpstreamTree, tree_of_texts


class MemoryCache(SummaryCache):
    """A cache without a database."""

    def _stored(self, key):
        return None

    def _store(self, key, packed):
        return None


def adopter(files: dict[str, str] | str) -> AdopterSource:
    texts = {"acme/train.py": files} if isinstance(files, str) else files
    texts = {path: dedent(text) for path, text in texts.items()}
    return AdopterSource("acme", "1.0", texts, len(texts), tuple(path for path in texts if path.endswith(".py")))


def extracted(files: dict[str, str] | str) -> Extracted:
    return extract_uses(adopter(files))


def uses(files: dict[str, str] | str) -> list[Use]:
    return list(extracted(files).uses)


def megatron(files: dict[str, str], label: str = "new") -> UpstreamTree:
    texts = {"megatron/core/__init__.py": "", **{path: dedent(text) for path, text in files.items()}}
    for path in list(texts):
        folder = path.rpartition("/")[0]
        while folder.count("/") >= 1:
            texts.setdefault(f"{folder}/__init__.py", "")
            folder = folder.rpartition("/")[0]
    return tree_of_texts(label, texts)


def side(files: dict[str, str], label: str = "new") -> Side:
    return Side.of(Resolver(megatron(files, label), MemoryCache()), label)


def found(source, new, old=None) -> list[tuple[str, str, int]]:
    """(severity, rule, line) of every finding."""
    return [(f.severity.value, f.rule, f.line) for f in findings(source, new, old)]


def findings(source, new, old=None) -> tuple[UsageFinding, ...]:
    reference = side(old, "old") if old is not None else None
    return check_uses(uses(source), side(new), reference)
