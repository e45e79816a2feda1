"""Typed errors of the harness: each says what was met and what to do next.

A verdict about a megatron-core is never an error: errors are for what stops the harness itself. Each class carries the
exit code that the command line ends with (2: the caller can put it right in the call or in a file; 3: this host cannot
judge).
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ExpectationError",
    "InfrastructureError",
    "InventoryError",
    "LockTimeoutError",
    "MatrixError",
    "McoreCompatError",
    "MergeError",
    "MissingToolError",
    "ReportError",
    "SelectionError",
    "UsageError",
]


class McoreCompatError(Exception):
    """Root of the harness's errors.

    Attributes:
        problem: what was met, naming the file, key, cell or tool.
        next_step: what the caller can do about it.
        exit_code: the exit code of a command that ends with this error.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, problem: str, next_step: str) -> None:
        self.problem = problem
        self.next_step = next_step
        super().__init__(f"{problem} Next step: {next_step}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problem, self.next_step))


class UsageError(McoreCompatError):
    """The call or one of the project's data files is wrong."""

    exit_code = 2


class MatrixError(UsageError):
    """``matrix.toml`` is not a valid matrix."""


class InventoryError(UsageError):
    """``inventory.toml`` is not a valid inventory."""


class ExpectationError(UsageError):
    """``expectations.toml`` is not a valid list of expectations."""


class SelectionError(UsageError):
    """The cells asked for do not exist, or there are none of them."""


class InfrastructureError(McoreCompatError):
    """This host cannot judge: a tool, the network or the disk is missing."""


class MissingToolError(InfrastructureError):
    """A program or an interpreter that the harness calls is not there."""


class LockTimeoutError(InfrastructureError):
    """Another run holds a cell's environment for too long."""


class ReportError(InfrastructureError):
    """A report could not be written; a run without its report is never green."""


class MergeError(InfrastructureError):
    """Runs that are not the shards of one run: they overlap, or were asked for with other inputs."""
