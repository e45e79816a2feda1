"""The command line ``mcore-compat``: its commands, and how every one of them ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from mcore_compat.cli import bundle, contract, gate, gpu, run
from mcore_compat.cli import releases as releases_commands
from mcore_compat.cli import usage as usage_commands
from mcore_compat.cli.bisect import bisect
from mcore_compat.cli.here import here
from mcore_compat.cli.init import init
from mcore_compat.errors import McoreCompatError
from mcore_compat.verdicts import ExitCode

__all__ = ["app", "main"]

_INTERRUPTED = 130

app = typer.Typer(
    help="Test a fused-forward implementation against every supported megatron-core release.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(init)
run.register(app)
gate.register(app)
app.command()(bisect)
app.command()(here)
app.add_typer(contract.app, name="contract")
app.command()(releases_commands.releases)
app.add_typer(releases_commands.watch, name="watch")
usage_commands.register(app)
app.command()(bundle.bundle)
app.add_typer(gpu.app, name="gpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error of the harness ends in two lines and its own exit code, any other one in code 3."""
    try:
        app(args=None if arguments is None else list(arguments))
    except McoreCompatError as exc:
        sys.stderr.write(f"error: {exc.problem}\nnext:  {exc.next_step}\n")
        raise SystemExit(exc.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    except Exception:  # noqa: BLE001  a fault of the harness is not a verdict about anybody's code
        traceback.print_exc()
        sys.stderr.write("error: The harness itself failed.\nnext:  Report the traceback above.\n")
        raise SystemExit(ExitCode.COULD_NOT_JUDGE) from None


if __name__ == "__main__":
    main()
