"""The weekly upstream watch: which candidates to judge, one note a candidate, and the body of the one living issue.

Notes come from jobs that ran a candidate's own code. They are text of unknown origin: only a few short fields and a
fenced, shortened excerpt of them reach the issue.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Candidate", "Note", "candidates", "issue_body", "run_command"]

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


def _read_notes(folder: Path) -> dict[str, Note]:
    found: dict[str, Note] = {}
    for path in sorted(folder.glob("*/note.json")):
        try:
            entry: Any = json.loads(path.read_text(encoding="utf-8"))
            note = Note(str(entry["name"]), int(entry["status"]), str(entry["excerpt"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if _NAME.fullmatch(note.name):
            found[note.name] = note
    return found


def _unknown_releases(root: Path) -> list[str]:
    from mcore_compat.matrix.cells import load_matrix
    from mcore_compat.releases.index import fetch_releases
    from mcore_compat.releases.model import load_releases, merge, unknown_to

    data = root / "compat_matrix"
    matrix = load_matrix(data / "matrix.toml")
    known = merge(load_releases(data / "releases.json"), fetch_releases())
    judged = {cell.megatron_core for cell in matrix.cells if cell.source is None}
    return [release.version for release in unknown_to(known, judged, matrix.cells[0].python)]


def _newest_gate_report(root: Path) -> str:
    reports = sorted((root / "reports").glob("*/gate.md"), key=lambda path: path.stat().st_mtime)
    return reports[-1].read_text(encoding="utf-8", errors="replace") if reports else ""


def run_command(arguments: Sequence[str], root: Path) -> int:
    """``ci/watch candidates | note | body``."""
    parser = argparse.ArgumentParser(prog="ci/watch", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("candidates", help="what to judge, as the matrix of a GitHub workflow")
    note = verbs.add_parser("note", help="write down what the gate said of a candidate")
    note.add_argument("--name", required=True)
    note.add_argument("--status", type=int, required=True)
    note.add_argument("--out", type=Path, required=True)
    body = verbs.add_parser("body", help="the body of the living issue")
    body.add_argument("--notes", type=Path, required=True)
    body.add_argument("--candidates", required=True, help="what `candidates` printed")
    body.add_argument("--run", required=True, help="address of this run")
    body.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.verb == "candidates":
        listed = [vars(candidate) for candidate in candidates(_unknown_releases(root))]
        sys.stdout.write(json.dumps(listed, separators=(",", ":")) + "\n")
    elif options.verb == "note":
        content = {"name": options.name, "status": options.status, "excerpt": _newest_gate_report(root)}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "note.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    else:
        judged = [Candidate(**entry) for entry in json.loads(options.candidates)]
        text = issue_body(judged, _read_notes(options.notes), options.run, dt.datetime.now(dt.UTC).date())
        options.out.write_text(text, encoding="utf-8")
    return 0
