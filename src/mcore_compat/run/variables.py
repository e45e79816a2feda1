"""Environment variables by which the runner tells a suite what it needs to know. Standard library only."""

from __future__ import annotations

__all__ = ["OUT", "PACKAGE", "PACKAGE_SOURCE", "ROOTS"]

# The folder of the results.
OUT = "MCORE_COMPAT_CELL_OUT"
# Modules of the project's own package, separated as in PATH.
PACKAGE = "MCORE_COMPAT_PACKAGE"
# The folder that an editable installation of it reads.
PACKAGE_SOURCE = "MCORE_COMPAT_PACKAGE_SOURCE"
# Further folders that modules may come from, separated as in PATH: those of an interpreter that is judged as it is.
ROOTS = "MCORE_COMPAT_ROOTS"
