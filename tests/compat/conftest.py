"""The property suite of a cell; its session is a plugin that other suites share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# The examples of the guides are in the checkout; the suite in the wheel has none.
collect_ignore = [] if (Path(__file__).parents[2] / "examples").is_dir() else ["test_example.py"]
pytest_plugins = ["support.session"]
