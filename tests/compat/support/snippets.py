"""The code blocks of the documentation, and where each of them runs. Standard library only.

A comment before a Python block says how it is tested: ``<!-- run: WORLD -->`` runs it with the names that the world
defines, ``<!-- compile only: REASON -->`` compiles it. A block without one of them is refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<how>[^\n]+?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_COMMAND = re.compile(r"(?:nox|mcore-compat|python3? ci/\w+|ci/\w+) ")


@dataclass(frozen=True)
class Snippet:
    """One fenced block of a page."""

    page: str  # relative to the checkout
    line: int
    language: str
    code: str
    how: str | None

    @property
    def id(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page}:{self.line}"

    @property
    def world(self) -> str | None:
        """The names that the block runs with, if it is run."""
        return self.how.removeprefix("run: ") if self.how and self.how.startswith("run: ") else None

    @property
    def reason(self) -> str | None:
        """Why the block is compiled only."""
        return self.how.removeprefix("compile only: ") if self.how and self.how.startswith("compile only: ") else None

    def compiled(self):
        """The block's code; tracebacks show page and line."""
        return compile("\n" * self.line + self.code, str(ROOT / self.page), "exec")


def pages() -> list[Path]:
    """Every page that a person reads; committed results quote terminals as they were."""
    documents = (path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts)
    return sorted([*ROOT.glob("*.md"), *documents])


def snippets_of(page: Path) -> list[Snippet]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("code")),
            language=found["language"],
            code=found["code"],
            how=found["how"],
        )
        for found in _BLOCK.finditer(text)
    ]


def python_snippets() -> list[Snippet]:
    """All Python blocks."""
    return [snippet for page in pages() for snippet in snippets_of(page) if snippet.language == "python"]


def commands_of(page: Path) -> list[str]:
    """Command lines of this project on a page: in blocks (after ``$``, where a terminal is quoted) and in prose."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line.removeprefix("$ ").strip()
        for snippet in snippets_of(page)
        if snippet.language not in {"python", "toml", "yaml"}
        for line in snippet.code.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in [*lines, *_INLINE.findall(prose)] if _COMMAND.match(line)]
