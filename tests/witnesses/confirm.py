"""Run every rule's witness where the rule applies and where it does not: it must fail there and pass here.

``python tests/witnesses/confirm.py [--cells .cells] [RULE …]`` makes the environments of the cells that it names, or
finds them made. Prints one Markdown row a rule, and ends with 1 where a witness is not confirmed. ``--results FILE``
also writes how many are, and which are not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from upstream_changes import BASE, RELEASE_CHANGES, RULE_CHANGES, edit_folder  # noqa: E402

from mcore_compat.contract.extract.surface import extract  # noqa: E402
from mcore_compat.contract.model import Contract  # noqa: E402
from mcore_compat.contract.rules.compare import Finding, FindingState, compare_contracts  # noqa: E402
from mcore_compat.contract.rules.rule import Rule, load_rules  # noqa: E402
from mcore_compat.contract.snapshots import load_snapshots  # noqa: E402
from mcore_compat.contract.source.tree import read_directory  # noqa: E402
from mcore_compat.errors import McoreCompatError  # noqa: E402
from mcore_compat.gate.cells import cell_of_release  # noqa: E402
from mcore_compat.gate.witness import Lines, Outcome, judge_witness, run_witnesses, witness_of  # noqa: E402
from mcore_compat.matrix.cells import Cell, ReasonedVariable, load_matrix  # noqa: E402
from mcore_compat.project import Project  # noqa: E402
from mcore_compat.provision.ensure import ensure_environments  # noqa: E402

DATA = ROOT / "compat_matrix"
RULES = {rule.id: rule for rule in load_rules(DATA / "rules")}
SNAPSHOTS = load_snapshots(DATA / "contracts")
MATRIX = load_matrix(DATA / "matrix.toml")
_NEEDED = {BASE, *(version for sides in RELEASE_CHANGES.values() for version in sides)}
# Addresses and folders: they differ from run to run.
_VARIABLE = re.compile(r" at 0x[0-9a-f]+| \(/[^)]*\)?")


@dataclass(frozen=True)
class Case:
    """A witness, filled in, and the two sides that it has to tell apart; ``tree`` is a changed copy of the second."""

    rule: Rule
    place: str
    finding: Finding | None
    sides: tuple[str, str]
    tree: Path | None = None


def main(arguments: list[str]) -> int:
    """Confirm and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rules", nargs="*", metavar="RULE", help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="sides side by side; default: all cores")
    parser.add_argument("--cells", type=Path, default=ROOT / ".cells", help="where the cells' environments are")
    parser.add_argument("--results", type=Path, help="a JSON file for the counts")
    options = parser.parse_args(arguments)
    try:
        ensure_environments(Project.at(ROOT).with_paths(cells=options.cells), _NEEDED, os.environ)
    except McoreCompatError as exc:
        sys.stderr.write(f"{exc}\n")
        return int(exc.exit_code)
    rules = [RULES[name] for name in options.rules or RULES]
    with tempfile.TemporaryDirectory(prefix="mcore-compat-changed-") as folder:
        cases = [case for rule in rules for case in _cases(rule, Path(folder), options.cells)]
        rows = _judged(cases, options.cells, options.jobs)
    rows += [(rule.id, "—", "none", str(rule.unwitnessed)) for rule in rules if rule.witness is None]
    sys.stdout.write("| rule | where | witness | it said |\n|---|---|---|---|\n")
    for name, place, state, note in sorted(rows):
        sys.stdout.write(f"| `{name}` | {place} | {state} | {note} |\n")
    others = sorted({name for name, _, state, _ in rows if state not in {"confirmed", "none"}})
    if options.results:
        confirmed = sum(state == "confirmed" for _, _, state, _ in rows)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps({"confirmed": confirmed, "others": others}) + "\n", encoding="utf-8")
    return 1 if others else 0


def _cases(rule: Rule, folder: Path, cells: Path) -> Iterator[Case]:
    if rule.witness is None:
        return
    if rule.id in RULE_CHANGES:
        yield _changed(rule, folder / rule.id, cells)
    if rule.id in RELEASE_CHANGES:
        old, new = RELEASE_CHANGES[rule.id]
        yield Case(rule, f"{old} → {new}", _finding(rule, SNAPSHOTS[old], SNAPSHOTS[new]), (old, new))
    if rule.id not in RULE_CHANGES and rule.id not in RELEASE_CHANGES:
        yield Case(rule, "nowhere", None, (BASE, BASE))


def _changed(rule: Rule, folder: Path, cells: Path) -> Case:
    """The base release, and a copy of it with the change in it."""
    (site,) = (cells / BASE / "venv" / "lib").glob("python3*/site-packages")
    shutil.copytree(site / "megatron", folder / "megatron")
    (metadata,) = site.glob("megatron_core-*.dist-info")
    shutil.copytree(metadata, folder / metadata.name)
    edit_folder(folder, RULE_CHANGES[rule.id])
    _lend_bytecode(cells / BASE / "home" / "bytecode", site, folder)
    finding = _finding(rule, SNAPSHOTS[BASE], extract(read_directory(folder), "changed"))
    return Case(rule, f"{BASE}, changed", finding, (BASE, BASE), folder)


def _finding(rule: Rule, old: Contract, new: Contract) -> Finding | None:
    found = [f for f in compare_contracts(old, new, [rule]) if f.state is FindingState.NEW]
    return found[0] if found else None


def _cell(version: str, tree: Path | None) -> Cell:
    cell = cell_of_release(MATRIX, version)
    assert cell is not None
    if tree is None:
        return cell
    added = (
        ReasonedVariable(name="PYTHONPATH", value=str(tree), reason="the changed copy comes first"),
        ReasonedVariable(name="PYTHONPYCACHEPREFIX", value=str(_bytecode(tree)), reason="the cell's own is sealed"),
    )
    return cell.model_copy(update={"env": (*cell.env, *added)})


def _bytecode(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}-bytecode")


def _lend_bytecode(lent: Path, site: Path, tree: Path) -> None:
    """Links to the cell's bytecode for what the copy has in common with it: without them each copy compiles anew."""
    if not lent.is_dir():
        return
    target = _bytecode(tree)
    shutil.copytree(lent, target, copy_function=os.symlink)
    own, theirs = (target / str(root / "megatron").lstrip("/") for root in (tree, site.resolve()))
    if theirs.is_dir():
        own.parent.mkdir(parents=True, exist_ok=True)
        theirs.rename(own)


def _judged(cases: list[Case], cells: Path, jobs: int) -> list[tuple[str, str, str, str]]:
    """Each side of all cases in as few processes as there are different megatron-cores: the import is what costs."""
    groups: dict[tuple[str, Path | None], list[tuple[int, int, Lines]]] = {}
    for number, case in enumerate(cases):
        lines = witness_of(case.finding) if case.finding is not None else None
        if lines is not None:
            for side, (version, tree) in enumerate(zip(case.sides, (None, case.tree), strict=True)):
                groups.setdefault((version, tree), []).append((number, side, lines))
    outcomes: dict[tuple[int, int], Outcome] = {}

    def ran(group: tuple[str, Path | None]) -> list[Outcome]:
        version, tree = group
        lines = [lines for *_, lines in groups[group]]
        return run_witnesses(lines, _cell(version, tree), cells / version, os.environ)

    with ThreadPoolExecutor(jobs) as pool:
        for (version, tree), found in zip(groups, pool.map(ran, groups), strict=True):
            wanted = groups[version, tree]
            outcomes |= {(number, side): outcome for (number, side, _), outcome in zip(wanted, found, strict=True)}
            sys.stderr.write(f"{version}{f', {tree.name}' if tree else ''}: {', '.join(o.result for o in found)}\n")
    return [_row(case, outcomes.get((number, 0)), outcomes.get((number, 1))) for number, case in enumerate(cases)]


def _row(case: Case, before: Outcome | None, after: Outcome | None) -> tuple[str, str, str, str]:
    if case.finding is None or before is None or after is None:
        return case.rule.id, case.place, "not run", "the rule is silent there"
    note = _VARIABLE.sub("", after.note or before.note).replace("|", "\\|").replace("\n", " ").strip()[:110]
    state = judge_witness(case.finding.state, before, after)
    return case.rule.id, case.place, state, f"`{note}`" if note else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
