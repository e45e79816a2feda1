"""The workflows: pinned, least of permissions, no log read, and no step that the project does not offer."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_compat.cli.main import app
from mcore_compat.contract.rules.classes import load_classified_matrix
from mcore_compat.matrix.selection import Selection, plan_cells

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
# Every other one writes nothing. The nightly one pushes the page, in a job of its own.
WRITES = {"upstream-watch": ["issues: write"], "release": ["id-token: write"], "nightly": ["contents: write"]}
each = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def test_all_of_them_are_there():
    assert {path.stem for path in WORKFLOWS} == {"pull-request", "nightly", "upstream-watch", "release"}


@each
def test_actions_are_pinned_by_commit_with_their_version_beside(path):
    uses = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@each
def test_nothing_is_permitted_by_default(path):
    text = path.read_text()
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert re.findall(r"[\w-]+: write", text) == WRITES.get(path.stem, [])


def test_the_job_that_pushes_the_page_runs_nothing_of_this_or_another_project():
    job = (FOLDER / "nightly.yml").read_text().partition("\n  page:\n")[2].partition("\n\n  ")[0]
    assert "contents: write" in job
    assert "if: ${{ vars.PUBLISH_PAGE == 'true' }}" in job
    assert not re.search(r"checkout@|pip |mcore-compat|python", job)


@each
def test_every_job_ends_by_itself_and_the_workflow_has_one_concurrency(path):
    text = path.read_text()
    assert text.count("timeout-minutes:") == text.count("runs-on:")
    assert re.search(r"^concurrency:$", text, re.MULTILINE)


@each
def test_no_log_is_read_and_no_expression_reaches_a_shell(path):
    text = path.read_text()
    assert not re.search(r"\bgrep\b|\.log\b", text)
    for block in re.findall(r"run: (?:\|\n((?:\s{10,}.*\n)+)|(.*))", text):
        assert "${{" not in "".join(block)


@each
def test_sessions_and_scripts_that_are_called_exist(path):
    text = path.read_text()
    sessions = set(re.findall(r"def (\w+)\(session", (ROOT / "noxfile.py").read_text()))
    for called in re.findall(r"nox --non-interactive -s ([a-z ]+?)(?: --|$|\n)", text):
        assert set(called.split()) <= sessions
    for script in re.findall(r"\bci/(\w+)", text):
        assert (ROOT / "ci" / script).is_file()


@each
def test_a_job_that_calls_the_command_installs_it_before(path):
    jobs = re.split(r"^  (?=\w+:\n)", path.read_text().partition("\njobs:\n")[2], flags=re.MULTILINE)
    assert len(jobs) > 1
    for job in jobs:
        before, called, _ = job.partition("mcore-compat ")
        if called and before.endswith(".venv/bin/"):
            assert "pip install" in before, "from an environment that the job made"
        elif called:
            assert "pip install --quiet uv" in before
            assert "uv pip install --quiet --system --editable '.[harness]'" in before


@pytest.mark.parametrize(("name", "classes"), [("pull-request", True), ("nightly", False)])
def test_the_workflow_plans_the_cells_of_the_command_line(name, classes):
    """Pull requests run what ``nox -s tests`` runs, nightly runs what ``nox -s compat`` runs."""
    text = (FOLDER / f"{name}.yml").read_text()
    (planned,) = re.findall(r"\$\(mcore-compat (plan [^)]*)\)", text)
    done = CliRunner().invoke(app, [*planned.split(), "--root", str(ROOT)], catch_exceptions=False)
    include = json.loads(done.stdout)["include"]
    cells = [cell for job in include for cell in job["cells"]]
    matrix = load_classified_matrix(ROOT / "compat_matrix")
    assert sorted(cells) == sorted(cell.id for cell in plan_cells(matrix, Selection(classes=classes)))
    assert [job["shard"] for job in include] == [f"{number}/{len(include)}" for number in range(1, len(include) + 1)]
    options = ["--classes"] * classes
    for job in include:
        shard = ["plan", *options, "--shard", job["shard"], "--root", str(ROOT)]
        listed = CliRunner().invoke(app, shard, catch_exceptions=False).stdout
        assert [line.split()[0] for line in listed.splitlines()] == job["cells"]
    assert f"compat --{' --classes' * classes} --shard" in text
    assert len(cells) == (9 if classes else len(matrix.cells))
