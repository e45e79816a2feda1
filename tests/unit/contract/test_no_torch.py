"""The static step needs no torch: neither the command line nor what it reads may import it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_command_line_imports_neither_torch_nor_megatron():
    code = "import sys, mcore_compat.cli.main; print(sorted({'torch', 'megatron'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
