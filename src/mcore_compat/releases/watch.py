"""The weekly upstream watch: which candidates to judge, one note per candidate, and the body of the one living issue.

Notes come from jobs that ran a candidate's own code. They are text of unknown origin: only a few short fields and a
fenced, shortened excerpt of them reach the issue.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from mcore_compat.errors import UsageError
from mcore_compat.files.atomic import write_atomically

__all__ = [
    "Candidate",
    "Note",
    "candidates",
    "candidates_as_json",
    "candidates_from_json",
    "issue_body",
    "newest_gate_report",
    "read_notes",
    "write_note",
]

UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"
# Replaced in the workflow by the folder that upstream's main was cloned into.
_CLONED = "git+file://UPSTREAM@HEAD"
_ANSWERS = {0: "yes", 1: "no", 2: "the call was wrong", 3: "could not be judged"}
# GitHub refuses an issue's body above 65,536 characters.
_BODY_LIMIT = 60_000
_EXCERPT_LIMIT = 6_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")


@dataclass(frozen=True)
class Candidate:
    """One thing to judge.

    Attributes:
        name: short and safe in file names.
        candidate: what the gate is given.
        repository: to clone first, or empty.
    """

    name: str
    candidate: str
    repository: str = ""


@dataclass(frozen=True)
class Note:
    """What a gate job left.

    Attributes:
        name: of its candidate.
        status: the gate's exit code.
        excerpt: of its report.
    """

    name: str
    status: int
    excerpt: str = ""


_NOTE = TypeAdapter(Note)
_CANDIDATES = TypeAdapter(tuple[Candidate, ...])


def candidates(unknown: Sequence[str]) -> tuple[Candidate, ...]:
    """Every release that the matrix lacks, and upstream's main.

    Args:
        unknown: versions, oldest first.
    """
    releases = [Candidate(f"release-{version}", f"megatron-core=={version}") for version in unknown]
    return (*releases, Candidate("main", _CLONED, UPSTREAM))


def issue_body(judged: Sequence[Candidate], notes: Mapping[str, Note], run: str, today: dt.date) -> str:
    """The whole body; a candidate without a note is said to have none."""
    lines = [
        "May we upgrade megatron-core? One line for each release that the matrix lacks, and for upstream's main.",
        f"This text is replaced every week; {today.isoformat()}, [the run with all reports]({run}).",
        "",
        "| candidate | may we upgrade? |",
        "|---|---|",
    ]
    for candidate in judged:
        note = notes.get(candidate.name)
        answer = _ANSWERS.get(note.status, "could not be judged") if note else "no answer: its job did not end"
        lines.append(f"| {candidate.name} | {answer} |")
    body = "\n".join(lines) + "\n"
    for candidate in judged:
        note = notes.get(candidate.name)
        if note is None or not note.excerpt or note.status == 0:
            continue
        section = f"\n### {candidate.name}\n\n~~~~text\n{_harmless(note.excerpt)}\n~~~~\n"
        if len(body) + len(section) > _BODY_LIMIT:
            body += "\nMore reports are in the run.\n"
            break
        body += section
    return body + (
        "\nNext step for a release with yes: add it to `compat_matrix/matrix.toml`; see `docs/add-a-version.md`.\n"
    )


def _harmless(text: str) -> str:
    """Shortened, without anything that ends the fence or mentions somebody."""
    cut = text if len(text) <= _EXCERPT_LIMIT else text[:_EXCERPT_LIMIT] + "\n…"
    printable = "".join(char for char in cut if char == "\n" or char.isprintable())
    return printable.replace("~~~", "~ ~ ~").replace("@", "@\u200b")


def read_notes(folder: Path) -> dict[str, Note]:
    """All notes in a folder of folders; what is not a note is left out, and its candidate then has no answer."""
    found: dict[str, Note] = {}
    for path in sorted(folder.glob("*/note.json")):
        try:
            note = _NOTE.validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if _NAME.fullmatch(note.name):
            found[note.name] = note
    return found


def write_note(folder: Path, note: Note) -> None:
    """Write a note where :func:`read_notes` finds it."""
    write_atomically(folder / "note.json", json.dumps(asdict(note)) + "\n")


def candidates_as_json(listed: Sequence[Candidate]) -> str:
    """The matrix of a GitHub workflow: one job per candidate, as JSON on one line."""
    return json.dumps([asdict(candidate) for candidate in listed], separators=(",", ":"))


def candidates_from_json(text: str) -> tuple[Candidate, ...]:
    """Read what :func:`candidates_as_json` wrote.

    Raises:
        UsageError: the text is something else.
    """
    try:
        return _CANDIDATES.validate_json(text)
    except ValueError as error:
        raise UsageError(
            "--candidates is not a list of candidates.", "Give what `mcore-compat watch candidates` printed."
        ) from error


def newest_gate_report(reports: Path) -> str:
    """Text of the newest ``gate.md`` below a report folder, or "" where there is none."""
    found = sorted(reports.glob("*/gate.md"), key=lambda path: path.stat().st_mtime)
    return found[-1].read_text(encoding="utf-8", errors="replace") if found else ""
