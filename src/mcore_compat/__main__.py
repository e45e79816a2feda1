"""``python -m mcore_compat``: the command line."""

from mcore_compat.cli.main import main

main()
