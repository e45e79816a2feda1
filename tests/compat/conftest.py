"""The property suite of a cell; its session is a plugin that other suites share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
pytest_plugins = ["support.session"]
