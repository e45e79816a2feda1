"""A model of its own: Megatron's GPT whose forward is counted."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

__all__ = ["CountedGPTModel"]


class CountedGPTModel(GPTModel):
    """GPTModel that counts its forward passes."""

    forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's forward."""
        self.forwards += 1
        return super().forward(*args, **kwargs)
