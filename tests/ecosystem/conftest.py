"""Checks with other packages' real code; the session is the property suite's."""

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "compat")]
pytest_plugins = ["support.session"]
# A cell has one of these packages; the inventory knows which checks it must run.
_PACKAGES = {"peft": "peft", "verl": "verl", "verl_engine": "verl"}
collect_ignore = [f"test_{name}.py" for name, package in _PACKAGES.items() if importlib.util.find_spec(package) is None]
