"""The documentation's code: Python blocks compile and run, commands and their options exist, files and links too."""

import ast
import functools
import importlib
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from worlds import WORLDS

from mcore_compat.cli.main import app

ROOT = Path(__file__).parents[3]
SNIPPETS = runpy.run_path(str(ROOT / "tests/compat/support/snippets.py"))
PAGES, PYTHON = SNIPPETS["pages"](), SNIPPETS["python_snippets"]()
CELL_WORLDS = ("gpt",)  # run in every cell, by tests/compat/test_example.py
REPOSITORY = "https://github.com/mcore-compat/mcore-compat"
COMMANDS = sorted(
    {(page.relative_to(ROOT).as_posix(), text) for page in PAGES for text in SNIPPETS["commands_of"](page)}
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: snippet.id)
def test_python_blocks_compile_and_say_how_they_are_tested(snippet):
    snippet.compiled()
    assert snippet.reason or snippet.world in (*WORLDS, *CELL_WORLDS), "say how this block is tested: see snippets.py"


@pytest.mark.parametrize(
    "snippet", [snippet for snippet in PYTHON if snippet.world in WORLDS], ids=lambda snippet: snippet.id
)
def test_python_blocks_run(snippet):
    exec(snippet.compiled(), WORLDS[snippet.world]())


@each_page
def test_toml_blocks_are_toml(page):
    for snippet in SNIPPETS["snippets_of"](page):
        if snippet.language == "toml":
            tomllib.loads(snippet.code)


def test_commands_were_found():
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=[f"{page}: {text}"[:90] for page, text in COMMANDS])
def test_commands_exist_with_their_options(page, text):
    _check(text)


@pytest.mark.parametrize(
    "text",
    [
        "nox -s nothing",
        "nox -s compat -- --nothing",
        "mcore-compat nothing",
        "mcore-compat gate 0.18.2 --nothing",
        "mcore-compat contract nothing",
        "ci/nothing --help",
        "python3 ci/gpu --nothing",
    ],
)
def test_commands_that_do_not_exist_are_noticed(text):
    with pytest.raises(AssertionError):
        _check(text)


def test_blocks_and_commands_are_read_as_written(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "Say `nox -s lint` or\n\n<!-- run: tensors -->\n```python\nx = 1\n```\n"
        "```\n$ mcore-compat plan \\\n  --github\nout\n```\n"
    )
    functions = SNIPPETS["snippets_of"].__globals__
    monkeypatch.setitem(functions, "ROOT", tmp_path)
    python, shell = SNIPPETS["snippets_of"](page)
    assert (python.world, python.code, python.line) == ("tensors", "x = 1\n", 4)
    assert (shell.world, shell.reason) == (None, None)
    assert SNIPPETS["commands_of"](page) == ["mcore-compat plan    --github", "nox -s lint"]


@each_page
def test_absolute_links_into_the_checkout_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    for pattern in (rf"{REPOSITORY}/(?:blob|tree)/main/([^)#\s\"]+)", rf"{raw}/main/([^)#\s\"]+)"):
        for path in re.findall(pattern, text):
            assert (ROOT / path).exists(), path


@each_page
def test_anchors_of_absolute_links_are_headings(page):
    for path, anchor in re.findall(
        rf"{REPOSITORY}/blob/main/([^)#\s]+\.md)#([\w-]+)", page.read_text(encoding="utf-8")
    ):
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{path}#{anchor}"


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_pages_that_are_shown_elsewhere_have_absolute_links_only(path):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / path).read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("https://")] == []


def test_files_that_the_pages_name_exist():
    """Paths in backticks that start at the top of the checkout."""
    named = re.compile(r"`((?:src|tests|docs|examples|benchmarks|compat_matrix|ci)/[\w./-]+)`")
    paths = [(page.name, path) for page in PAGES for path in named.findall(page.read_text(encoding="utf-8"))]
    assert paths
    assert [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_modules_and_functions_that_the_pages_name_exist():
    """Dotted names of this project's packages, in backticks."""
    named = re.compile(r"`(mcore_(?:fused|compat)(?:\.\w+)+)(?=[`(])")
    names = sorted({name for page in PAGES for name in named.findall(page.read_text(encoding="utf-8"))})
    assert len(names) > 5
    assert [name for name in names if not _resolves(name)] == []


def _resolves(name: str) -> bool:
    parts = name.split(".")
    thing = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(thing, part):
            try:
                importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                return False
        thing = getattr(thing, part)
    return True


def _check(text: str) -> None:
    """Refuse a command line of this project that could not run."""
    words = _words(text)
    if words[0] == "nox":
        _check_nox(words[1:])
    elif words[0] == "mcore-compat":
        _check_options(_command(words[1:]), words)
    else:
        script = words[1] if words[0].startswith("python") else words[0]
        assert (ROOT / script).is_file(), script
        _check_script(Path(script).name, words)


def _words(text: str) -> list[str]:
    words = shlex.split(text, comments=True)
    ends = [index for index, word in enumerate(words) if word in {"&&", "|", ";", ">"}]
    return words[: ends[0]] if ends else words


def _check_nox(words: list[str]) -> None:
    own, passed = _split(words)
    names = [word for word in own[own.index("-s") + 1 :] if not word.startswith("-")] if "-s" in own else []
    assert {re.sub(r"\(.*\)", "", name) for name in names} <= _sessions(), names
    served = {"compat": ["run"], "gate": ["gate"], "ecosystem": ["run"]}
    for name in names:
        if name in served:
            _check_options(_command(served[name]), passed)
        elif name in {"gpu", "bundle"}:
            _check_script(name, passed)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What nox reads, and what it hands on."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


@functools.cache
def _program() -> Any:
    return typer.main.get_command(app)


def _command(words: list[str]) -> Any:
    command = _program()
    for word in words:
        if word.startswith("-") or not hasattr(command, "commands"):
            break
        assert word in command.commands, word
        command = command.commands[word]
    return command


def _check_options(command: Any, words: list[str]) -> None:
    known = {"--help", *(text for one in command.params for text in (*one.opts, *one.secondary_opts))}
    for word in words:
        if word.startswith("-") and word != "--":
            assert word.split("=")[0] in known, word


def _check_script(name: str, words: list[str]) -> None:
    sources = [
        ROOT / "ci" / name,
        *(ROOT / "src/mcore_compat/cli").glob("*.py"),
        *(ROOT / "src/mcore_compat/provision").glob("bundle*.py"),
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    for word in words:
        if word.startswith("--") and word != "--":
            assert f'"{word.split("=")[0]}"' in text or word == "--help", word
