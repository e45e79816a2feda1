"""``mcore-compat init``: thin; it reads arguments, calls functions, prints."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from mcore_compat.adopt.files import WORKFLOW, chosen_matrix, files_of
from mcore_compat.adopt.survey import Survey, survey
from mcore_compat.adopt.write import Outcome, Written, write_files
from mcore_compat.errors import UsageError
from mcore_compat.matrix.cells import load_matrix
from mcore_compat.project import THIS_PROJECT, packaged_data
from mcore_compat.settings import Releases, Settings, load_settings

__all__ = ["init"]

_NEW_SUITE, _OTHER_SUITE = "tests/compat", "tests/megatron_compat"
_KEYS = f"Keys of the settings: {', '.join(Settings.model_fields)}. Of [matrix]: {', '.join(Releases.model_fields)}."
_TOLD = {
    Outcome.WRITTEN: "written",
    Outcome.UPDATED: "updated: it was unedited",
    Outcome.UNCHANGED: "unchanged",
    Outcome.KEPT: "kept as it is: it was edited, or init did not write it",
}


def init(
    path: Annotated[Path, typer.Argument(help="Root of the repository; default: here.")] = Path(),
    releases: Annotated[
        str | None, typer.Option("--releases", help="Range of megatron-core in place of the declared one: >=0.16,<0.20")
    ] = None,
) -> None:
    """Write settings, a first suite and a workflow for a repository that builds on Megatron; edited files stay."""
    root = path.resolve()
    if not root.is_dir():
        raise UsageError(f"{path} is not a folder.", "Name the root of a repository.")
    settings = load_settings(root)
    found = survey(root)
    if found.package == THIS_PROJECT:
        raise UsageError("This is the harness's own repository.", "Name the root of another project.")
    if settings is not None and releases is not None:
        raise UsageError(
            "The project has settings already.", "Change `matrix` there; --releases is for the first call."
        )
    known = load_matrix(packaged_data() / "matrix.toml")
    matrix = chosen_matrix(found, known, _range(releases)) if settings is None else None
    suite = settings.suite if settings is not None else _free_suite(root)
    written = write_files(root, files_of(found, matrix, version(THIS_PROJECT), suite))
    for line in _told(root, found, matrix, written, ranged=releases is not None):
        typer.echo(line)


init.__doc__ = f"{init.__doc__}\n\n{_KEYS}"


def _range(text: str | None) -> SpecifierSet | None:
    try:
        return None if text is None else SpecifierSet(text)
    except InvalidSpecifier as exc:
        raise UsageError(f"--releases: `{text}` is not a specifier.", "Write it as in '>=0.16,<0.20'.") from exc


def _free_suite(root: Path) -> str:
    """A folder that has no tests of the project: all that is in the suite's folder is run in every cell."""
    folder = root / _NEW_SUITE
    return _OTHER_SUITE if folder.exists() and any(folder.iterdir()) else _NEW_SUITE


def _told(
    root: Path, found: Survey, matrix: Releases | None, written: tuple[Written, ...], *, ranged: bool
) -> list[str]:
    lines = [f"{found.package}: {len(found.modules)} modules use Megatron, {len(found.replaced)} symbols are replaced"]
    if found.tolerated:
        lines.append(f"note: {found.tolerated} more are replaced behind a guard; no test asks that they exist")
    lines += [f"note: not read: {problem}" for problem in found.unread]
    if matrix is None:
        lines.append("note: the project has settings; they stay")
    else:
        if not str(found.declared) and not ranged:
            lines.append("note: no range of megatron-core is declared; correct `releases`, or declare one")
        lines.append(f"matrix: {', '.join(matrix.releases)}")
    lines += [f"{one.path}: {_TOLD[one.outcome]}" for one in written]
    lines += ["next: mcore-compat plan", "      mcore-compat check .", "      mcore-compat run"]
    if (root / "noxfile.py").is_file():
        lines.append('      in noxfile.py: session.run("mcore-compat", "run", *session.posargs, external=True)')
    if any(one.path == WORKFLOW and one.outcome is Outcome.WRITTEN for one in written):
        lines.append(f"      commit {WORKFLOW}; it runs the same in pull requests and every week")
    return lines
