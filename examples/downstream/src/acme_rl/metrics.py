"""The loss of multi-token prediction is kept for the trainer's own log before Megatron clears it."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

__all__ = ["KEPT", "install"]

KEPT: list[dict[str, Any]] = []


def _keep_then_clear() -> None:
    KEPT.append(dict(MTPLossLoggingHelper.tracker))
    MTPLossLoggingHelper.tracker.clear()


def install() -> None:
    """Replace Megatron's clean-up; its name is another one since 0.19."""
    MTPLossLoggingHelper.clean_loss_in_tracker = staticmethod(_keep_then_clear)
