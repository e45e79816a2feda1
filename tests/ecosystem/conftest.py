"""Set-up of the checks with other packages' real code: a cell's own, from the property suite."""

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_COMPAT = _HERE.parent / "compat"
sys.path[:0] = [str(_HERE), str(_COMPAT)]
_spec = importlib.util.spec_from_file_location("compat_session", _COMPAT / "conftest.py")
sys.modules["compat_session"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["compat_session"])
pytest_plugins = ["compat_session"]
# A cell has one of these packages; the inventory knows which checks it must run.
collect_ignore = [f"test_{name}.py" for name in ("peft", "verl") if importlib.util.find_spec(name) is None]
