"""Commands of contracts, discovery, gate and bisect, put on the one command line."""

from __future__ import annotations

import typer

from mcore_compat.contract import cli as contract_cli
from mcore_compat.releases import cli as releases_cli

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to ``mcore-compat``."""
    app.add_typer(contract_cli.app, name="contract")
    app.command()(releases_cli.releases)
