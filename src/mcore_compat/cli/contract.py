"""``mcore-compat contract …``: thin; it reads arguments, calls pure functions, prints."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from mcore_compat.contract.explain import Comparison, as_json, as_markdown, as_text
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.model import Contract
from mcore_compat.contract.rules.classes import equivalence_classes
from mcore_compat.contract.rules.compare import check_contract, compare_contracts
from mcore_compat.contract.rules.predicates import shown
from mcore_compat.contract.rules.rule import Rule, load_rules
from mcore_compat.contract.scan import as_line, scan
from mcore_compat.contract.snapshots import load_snapshots, save_snapshot, snapshot_path, sorted_names
from mcore_compat.contract.source.candidate import CandidateKind, open_candidate, parse_candidate
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.project import Project
from mcore_compat.releases import IndexUnreachableError, Release, load_releases
from mcore_compat.verdicts import ExitCode

__all__ = ["app", "obtain", "rules_of"]

app = typer.Typer(
    help="What we depend on in a megatron-core, read from its source without running it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Format(StrEnum):
    """How a comparison is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


Source = Annotated[
    str, typer.Argument(help="0.18.2, megatron-core==0.18.2, a wheel, an sdist, a folder, git+file:///repository@ref")
]
Root = Annotated[Path | None, typer.Option("--root", help="The project's root; default: found upwards from here.")]
Shape = Annotated[Format, typer.Option("--format", "-f", help="text, markdown or json.")]
Everything = Annotated[bool, typer.Option("--all", help="Also notes, and what both sides have.")]


def rules_of(data: Path) -> tuple[Rule, ...]:
    """The rules of a data folder."""
    return load_rules(data / "rules")


def obtain(text: str, data: Path, releases: tuple[Release, ...] | None = None) -> Contract:
    """Contract of whatever ``text`` names; a release with a committed snapshot is not read again.

    Raises:
        SourceError: it cannot be read.
        NoSuchReleaseError: an unknown release.
    """
    candidate = parse_candidate(text)
    if candidate.kind is CandidateKind.RELEASE and candidate.version is not None:
        path = snapshot_path(data / "contracts", candidate.version)
        if path.is_file():
            return Contract.from_json(path.read_text(encoding="utf-8"), path.name)
    known = releases if releases is not None else load_releases(data / "releases.json")
    return extract(open_candidate(candidate, known), candidate.label)


def _print(comparison: Comparison, shape: Format, everything: bool) -> None:
    if shape is Format.JSON:
        typer.echo(as_json(comparison), nl=False)
    elif shape is Format.MARKDOWN:
        typer.echo(as_markdown(comparison, everything=everything), nl=False)
    else:
        typer.echo(as_text(comparison, everything=everything), nl=False)
    raise typer.Exit(ExitCode.BREAK if comparison.level == "break" else ExitCode.GREEN)


@app.command()
def show(
    source: Source,
    shape: Annotated[Format, typer.Option("--format", "-f", help="text or json (a snapshot).")] = Format.TEXT,
    root: Root = None,
) -> None:
    """Print the contract of one megatron-core."""
    contract = obtain(source, Project.readable(root).known)
    if shape is Format.JSON:
        typer.echo(contract.to_json(), nl=False)
        return
    typer.echo(f"{contract.name}: {contract.labels.describe()}")
    for item in contract.items.values():
        typer.echo(f"{item.direction.value:9} {item.id} = {shown(item.value)}")


@app.command()
def diff(
    old: Source, new: Source, shape: Shape = Format.TEXT, everything: Everything = False, root: Root = None
) -> None:
    """Explain what going from one megatron-core to another means for us; exit code 1: a mode breaks."""
    data = Project.readable(root).known
    before, after = obtain(old, data), obtain(new, data)
    _print(Comparison(before, after, compare_contracts(before, after, rules_of(data))), shape, everything)


@app.command()
def check(
    source: Source,
    baseline: Annotated[
        str | None, typer.Option("--baseline", "-b", help="Judge changes against this one too.")
    ] = None,
    shape: Shape = Format.TEXT,
    everything: Everything = False,
    root: Root = None,
) -> None:
    """Judge one megatron-core by the rules; exit code 1: a mode breaks."""
    data = Project.readable(root).known
    if baseline is not None:
        diff(baseline, source, shape, everything, root)
        return
    contract = obtain(source, data)
    _print(Comparison(None, contract, check_contract(contract, rules_of(data))), shape, everything)


@app.command("scan")
def scan_branches(
    repository: Annotated[Path, typer.Argument(help="A checkout or bare repository of upstream's.")],
    refs: Annotated[
        list[str] | None, typer.Option("--refs", help="Which branches, as git names them; repeatable.")
    ] = None,
    onto: Annotated[list[str] | None, typer.Option("--onto", help="Where they start from; repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also branches that change nothing for us.")] = False,
    root: Root = None,
) -> None:
    """What upstream's pull requests would change for us; nothing of them is run. Always exit code 0."""
    patterns = refs or ["refs/pull/*/head", "refs/heads/pull-request"]
    counts: dict[str, int] = {}
    for branch in scan(repository, patterns, onto or ["main"], rules_of(Project.readable(root).known)):
        told = [finding for finding in branch.findings if everything or finding.level != "info"]
        counts[branch.judgement] = counts.get(branch.judgement, 0) + 1
        if told or branch.problem or everything:
            typer.echo(as_line(branch))
        if branch.problem:
            typer.echo(f"         {branch.problem}")
        # Several models may share the line that a rule is about.
        for level, words, where in dict.fromkeys((f.level, f"{f.text} ({f.rule.id})", f.where) for f in told):
            typer.echo(f"         [{level}] {words}")
            typer.echo(f"             at {where or 'an unknown place'}")
    total = sum(counts.values())
    typer.echo(f"{total} branches: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}")


def _judged_releases(matrix: Path) -> set[str]:
    """Releases of the matrix: each needs a contract, or it is a class of its own."""
    cells = load_matrix(matrix).cells if matrix.is_file() else ()
    return {str(Version(cell.megatron_core)) for cell in cells if cell.source is None}


@app.command()
def snapshot(
    versions: Annotated[list[str] | None, typer.Argument(help="Default: all committed, and the matrix's.")] = None,
    verify: Annotated[bool, typer.Option("--check", help="Compare with the committed files, write nothing.")] = False,
    root: Root = None,
) -> None:
    """Read releases from the index again and write their snapshots; with --check exit code 1 if one differs.

    What cannot be fetched is listed by name and ends with exit code 3; what was fetched before is read from the cache.
    """
    data = Project.find(root).data
    releases = load_releases(data / "releases.json")
    folder = data / "contracts"
    stale, unread = [], []
    names = versions or sorted_names({*load_snapshots(folder), *_judged_releases(data / "matrix.toml")})
    for name in names:
        try:
            tree = open_candidate(parse_candidate(f"megatron-core=={name}"), releases)
        except IndexUnreachableError as error:
            unread.append(name)
            typer.echo(f"{name}: not read, {error.problem}")
            continue
        contract = extract(tree, name)
        path = snapshot_path(folder, name)
        same = path.is_file() and path.read_text(encoding="utf-8") == contract.to_json()
        if not same:
            stale.append(name)
            if not verify:
                save_snapshot(folder, contract)
        typer.echo(f"{name}: {'same' if same else 'differs' if verify else 'written'}")
    if stale and verify:
        typer.echo(
            f"next: see what moved with `mcore-compat contract snapshot {' '.join(stale)}` and git diff", err=True
        )
        raise typer.Exit(ExitCode.BREAK)
    if unread:
        raise IndexUnreachableError(
            f"{len(unread)} of {len(names)} releases could not be read again, so their contracts are not compared.",
            "run where the index can be reached, or set PIP_INDEX_URL to one that can.",
        )


@app.command()
def classes(as_data: Annotated[bool, typer.Option("--json", help="As JSON.")] = False, root: Root = None) -> None:
    """Group the releases whose binding surface is the same; the newest of a group represents it."""
    data = Project.readable(root).known
    groups = equivalence_classes(load_snapshots(data / "contracts"), rules_of(data))
    if as_data:
        typer.echo(json.dumps([{"name": g.name, "digest": g.digest, "members": g.members} for g in groups], indent=1))
        return
    for group in groups:
        typer.echo(f"{group.name:10} {', '.join(group.members)}   ({group.digest[:12]})")
