"""Imports go downwards only, in the order that pyproject.toml declares and the architecture page shows."""

import re
import tomllib
from pathlib import Path

from importlinter.api import read_configuration
from importlinter.application.use_cases import SUCCESS, lint_imports

ROOT = Path(__file__).parents[3]


def test_no_room_imports_from_one_above_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]) == 4
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None) == SUCCESS


def test_the_architecture_page_shows_the_declared_order():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [room.strip() for layer in contracts[0]["layers"] for room in layer.split("|")]
    section = (ROOT / "docs/architecture.md").read_text().split("## The life of one cell")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    shown = [room for row in rows for room in re.findall(r"`(\w+)`", row)]
    assert [room for room in shown if room != "testing"] == layers
