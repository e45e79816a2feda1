"""The command line: the only place that reads arguments."""

import sys

# Checked before any other module of the harness is imported: those use the syntax of 3.12. What a cell's suite imports
# (``testing``, ``subjects.protocol``, ``run.pytest_plugin``) runs on 3.10 and later, as mcore_fused does.
if sys.version_info[:2] < (3, 12):
    sys.stderr.write(
        "error: The harness needs Python 3.12 or later; this is Python {}.{}.\n"
        "next:  Run it with Python 3.12; cells with another interpreter get their own.\n".format(*sys.version_info[:2])
    )
    raise SystemExit(3)
